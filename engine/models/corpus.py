"""Made-up text, the same for the same seed: what the tokenizer of a made model is trained on."""

import random
from collections.abc import Iterator

COMMON_WORDS = (
    "the of and to a in is that it was for on are as with his they at be this from have or by one had not but "
    "what all were when we there can an your which their said if do will each about how up out them then she many "
    "some so these would other into has more her two like him see time could no make than first been its who now "
    "people my made over did down only way find use may water long little very after words called just where most "
    "know get through back much before go good new write our used me man too any day same right look think also "
    "around another came come work three word must because does part even place well such here take why things "
    "help put years different away again off went old number great tell men say small every found still between "
    "name should home big give air line set own under read last never us left end along while might next sound "
    "below saw something thought both few those always looked show large often together asked house world going "
    "want school important until form food keep children feet land side without boy once animals life enough took"
).split()
_ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sl sp st str t th tr v w".split()
_NUCLEI = "a e i o u ai ea ee ie oa ou".split()
_CODAS = ["", "", *"n r s t l m d ck nd ng nt rd ss st tion ly er ing".split()]
_SENTENCE_ENDS = [".", ".", ".", "?", "!", ";", ":"]


def made_up_text(seed: int, *, rare_words: int, sentences: int) -> Iterator[str]:
    """``sentences`` sentences of common English and ``rare_words`` invented words, the frequent ones more often."""
    chance = random.Random(seed)
    words = list(COMMON_WORDS)
    for _ in range(rare_words):
        parts = chance.randint(1, 3)
        syllables = [chance.choice(_ONSETS) + chance.choice(_NUCLEI) for _ in range(parts)]
        words.append("".join(syllables) + chance.choice(_CODAS))
    frequency = [1.0 / (rank + 10) for rank in range(len(words))]  # Zipf's law, flattened at the top
    for _ in range(sentences):
        chosen = chance.choices(words, weights=frequency, k=chance.randint(4, 18))
        if chance.random() < 0.1:
            chosen.append(str(chance.randint(0, 10_000)))
        yield " ".join(chosen).capitalize() + chance.choice(_SENTENCE_ENDS)
