"""A model's own tokenizer for the server: the Rust part of it, which any thread may use at any time."""

from collections.abc import Mapping, Sequence

from jinja2.exceptions import TemplateError
from rooftune.policies.errors import InputError
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# A template is a program that came with the model.
_FAILURES = (TemplateError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)


class ModelTokenizer:
    """Implements ``rooftune.engine.server_text.Tokenizer``. Raises InputError for a tokenizer without a Rust part."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_tokens: int) -> None:
        self.vocab_tokens = vocab_tokens
        self._whole = tokenizer
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise InputError("this model's tokenizer has no fast form; save it with a tokenizer.json")
        self._fast = fast
        # transformers sets these for every call, and two threads would meet there; here they are set once.
        self._fast.no_truncation()
        self._fast.no_padding()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        # The plain ``encode`` keeps the GIL to its end, and with it every stream: longer than a step for a long
        # document. This one gives it free.
        ids: list[int] = self._fast.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=True)
        return text

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not self._whole.chat_template:
            raise InputError("this model has no chat template; use /v1/completions")
        try:
            text: str = self._whole.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except _FAILURES as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"the model's chat template refuses these messages: {reason[:200]}") from error
        return text
