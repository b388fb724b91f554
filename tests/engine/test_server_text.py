"""From tokens to text: whole characters only, stop strings across every boundary, nothing lost or held forever."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftune.engine.server.stream import UNFINISHED, ByteTokenizer, Detokenizer, StopStrings

BYTES = ByteTokenizer(1000)


def pieces(tokens: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(BYTES, prompt)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


def test_a_character_leaves_with_its_last_byte() -> None:
    assert pieces("a€b".encode()) == ["a", "", "", "€", "b", ""]


@given(st.text(), st.binary(max_size=8))
def test_every_text_is_streamed_whole_without_broken_characters(text: str, prompt: bytes) -> None:
    if UNFINISHED in text:
        return
    prompt = prompt.decode(errors="ignore").encode()  # a prompt may not swallow the answer's first byte
    found = pieces(text.encode(), list(prompt))
    assert "".join(found) == text
    assert not any(UNFINISHED in piece for piece in found)


@given(st.binary(max_size=300) | st.integers(1, 300).map(lambda count: b"\x80" * count))
def test_invalid_bytes_are_emitted_once(noise: bytes) -> None:
    found = pieces(noise)
    assert "".join(found) == noise.decode(errors="replace")
    assert found[-1].count(UNFINISHED) <= 16, "too much was held back to the end"


def test_a_prompt_that_ends_within_a_character() -> None:
    assert pieces(b"\x82\xacx", b"price \xe2") == ["", "€", "x", ""], "the answer finishes it"
    assert pieces(b"ux", b"price \xe2") == ["u", "x", ""], "the answer does not, so it stays the prompt's"
    assert pieces(b"", b"price \xe2") == [""]


def test_an_unfinished_character_is_shown_at_the_end_only() -> None:
    assert pieces(b"ab\xe2\x82") == ["a", "b", "", "", UNFINISHED]


class Counting(ByteTokenizer):
    """Counts the tokens it had to decode; 0 is a special token without text."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.decoded += len(token_ids)
        return super().decode([token for token in token_ids if token])


@pytest.mark.parametrize("token", [0, 97, 0x80], ids=["special", "letter", "noise"])
def test_work_per_token_does_not_grow_with_the_answer(token: int) -> None:
    tokenizer = Counting()
    detokenizer = Detokenizer(tokenizer, [97] * 1000)
    for _ in range(2000):
        detokenizer.push(token)
    assert tokenizer.decoded < 2000 * 2 * 70


class SpaceStripping(ByteTokenizer):
    """Like sentencepiece: the first word of whatever is decoded loses its leading space."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode(token_ids).removeprefix(" ")


def test_the_space_before_the_first_word_stays() -> None:
    detokenizer = Detokenizer(SpaceStripping(1000), list(b"say"))
    found = "".join(detokenizer.push(token) for token in b" it now")
    assert found + detokenizer.finish() == " it now"


class ByteFallback(ByteTokenizer):
    """Like Llama's byte fallback: a run of bytes that is not valid as a whole is nothing but unfinished marks."""

    def decode(self, token_ids: Sequence[int]) -> str:
        run = bytes(token_ids)
        try:
            return run.decode()
        except UnicodeDecodeError:
            return UNFINISHED * len(run)


@given(st.text(alphabet="aé€😀", max_size=30))
def test_byte_fallback_is_decoded_whole(text: str) -> None:
    detokenizer = Detokenizer(ByteFallback(256), [])
    found = [detokenizer.push(token) for token in text.encode()]
    assert "".join(found) + detokenizer.finish() == text


@given(st.text(alphabet="aé€😀", max_size=40), st.text(alphabet="aé€😀", max_size=10))
def test_byte_fallback_works_after_a_prompt_that_ends_within_a_character(prompt: str, text: str) -> None:
    detokenizer = Detokenizer(ByteFallback(256), list(prompt.encode()))
    found = [detokenizer.push(token) for token in text.encode()]
    assert "".join(found) + detokenizer.finish() == text


def shown(chunks: Sequence[str], stops: Sequence[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    text = ""
    for chunk in chunks:
        text += matcher.push(chunk)
        if matcher.hit is not None:
            assert matcher.finish() == ""
            return text, matcher.hit
    return text + matcher.finish(), None


@given(
    st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3), st.data()
)
def test_stop_strings_cut_the_same_however_the_text_is_split(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[first:last] for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert shown(chunks, stops) == by_characters(text, stops)


def by_characters(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The same, spelled out: the first place where a stop string ends; of several that end there the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_the_first_complete_stop_string_wins_in_any_order() -> None:
    for stops in (["bb", "a"], ["a", "bb"]):
        assert shown(["xabb"], stops) == ("x", "a")
    assert shown(["xabc"], ["abc", "b"]) == shown(list("xabc"), ["abc", "b"]) == ("xa", "b")


def test_text_is_held_only_while_it_could_become_a_stop_string() -> None:
    matcher = StopStrings(["\n\nUser:"])
    assert [matcher.push(piece) for piece in ("Hi", "\n", "\nUs", "ed", " it")] == ["Hi", "", "", "\n\nUsed", " it"]
