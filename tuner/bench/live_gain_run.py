"""The processes of bench ``live-gain``: an engine, and a client that sends rounds when it is told to."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rooftune.policies import wire
from rooftune.policies.errors import RefusedError, UnreachableError
from rooftune.policies.request import Setting
from rooftune.tuner.bench.children import Children, Served, Talker
from rooftune.tuner.bench.live_gain_plan import Listed, Round, csv_of, round_of
from rooftune.tuner.observe.rows import RequestRows
from rooftune.tuner.ports.http import HttpPort

LEASE_S = 3600.0
# Longest wait for a client to start, and for a round to run empty.
START_S, ROUND_S = 60.0, 600.0


@dataclass
class Bed:
    """One engine under test, with the rows of ended requests that were read so far."""

    children: Children
    served: Served
    port: HttpPort
    model: str
    work: Path
    after: int = -1

    def client(self, requests: Listed, name: str = "client") -> Talker:
        """A client that knows the list."""
        traffic = self.work / f"{name}.csv"
        traffic.write_text(csv_of(requests))
        words = ["-m", "rooftune.tuner.bench.rounds_client", self.served.base, self.model, str(traffic)]
        client = self.children.talk(name, words)
        client.hear("ready", START_S)
        return client

    def round(self, client: Talker, requests: Listed) -> Round:
        """The list once, from an empty engine to an empty engine."""
        self._new_rows()
        client.say("go")
        client.hear("sending", START_S)
        client.hear("done", ROUND_S)
        rows = self._new_rows()
        if len(rows) < len(requests):
            raise UnreachableError(f"{len(requests)} requests were sent and {len(rows)} have left a row at the engine")
        return round_of(rows, requests)

    def _new_rows(self) -> RequestRows:
        pages = [RequestRows.none()]
        while True:
            page = self.port.requests_after(self.after)
            if not page.sequence:
                whole = [rows for rows in pages if len(rows)]
                return RequestRows.join(whole) if whole else pages[0]
            self.after = page.next
            pages.append(RequestRows.from_wire(page))

    def push(self, setting: Setting) -> None:
        """Put budget and chunk cap in force for as long as the bench takes. Raises RefusedError when refused."""
        knobs = wire.Knobs(step_tokens=setting.step_tokens, chunk_cap_tokens=setting.chunk_cap_tokens)
        revision = self.port.state().revision
        answer = self.port.push(
            wire.PushRequest(
                knobs=knobs, lease_s=LEASE_S, expected_revision=revision, actor="bench", reason="live-gain sweep"
            )
        )
        if isinstance(answer, wire.Refusal):
            raise RefusedError(f"the engine refuses {knobs}: {answer.message}")

    def shares(
        self,
        client: Talker,
        requests: Listed,
        settings: Sequence[Setting],
        repeats: int,
        targets: tuple[float, float],
    ) -> tuple[tuple[float, ...], ...]:
        """Good share of a round under each setting, [repeat][setting]; each repeat takes them in an order of its own.

        targets: TTFT and longest gap, seconds.
        """
        found = []
        for repeat in range(repeats):
            order = list(range(len(settings)))
            random.Random(repeat).shuffle(order)
            share = dict.fromkeys(order, 0.0)
            for at in order:
                self.push(settings[at])
                share[at] = float(self.round(client, requests).good(*targets).mean())
            found.append(tuple(share[at] for at in range(len(settings))))
        return tuple(found)

    def makespan_s(self, client: Talker, requests: Listed) -> float:
        """How long the engine takes when all come at once: its greatest rate is their number over that."""
        found = self.round(client, requests)
        return float(np.max(found.finish_s) - np.min(found.arrival_s))
