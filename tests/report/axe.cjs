// NODE_PATH=FOLDER/node_modules node axe.cjs PAGE...: axe-core in Chromium, at desktop and phone width. One JSON line.
const fs = require('fs');
const { chromium } = require('playwright-core');
const axe = fs.readFileSync(require.resolve('axe-core/axe.min.js'), 'utf8');
const tags = ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'];
(async () => {
  const args = process.getuid() === 0 ? ['--no-sandbox'] : [];
  const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || '/usr/bin/chromium', args });
  const result = [];
  for (const file of process.argv.slice(2)) {
    for (const width of [1280, 390]) {
      const context = await browser.newContext({ bypassCSP: true, viewport: { width, height: 900 } });
      const page = await context.newPage();
      let asked = 0;
      page.on('request', () => (asked += 1));
      await page.goto('file://' + file);
      await page.addScriptTag({ content: axe });
      const found = await page.evaluate((tags) => axe.run(document, { runOnly: tags }), tags);
      const root = 'document.documentElement';
      result.push({
        file, width,
        violations: found.violations.map((one) => `${one.id}: ${one.nodes[0].html}`),
        undecided: found.incomplete.map((one) => one.id),
        external_requests: asked - 1,
        sideways_px: await page.evaluate(`${root}.scrollWidth - ${root}.clientWidth`),
      });
      await context.close();
    }
  }
  await browser.close();
  console.log(JSON.stringify(result));
})().catch((error) => { console.error(String(error)); process.exit(1); });
