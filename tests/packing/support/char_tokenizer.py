"""A tokenizer of one token per character."""

VOCAB_SIZE = 128


def tokenize_chars(text: str) -> list[int]:
    """Return the code points modulo VOCAB_SIZE; raise on lone surrogates, as real tokenizers do."""
    text.encode("utf-8")
    return [ord(letter) % VOCAB_SIZE for letter in text]
