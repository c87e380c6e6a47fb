"""Default corpus: the source files of the Python standard library, one document each.

The tokenizer is a byte-level BPE trained on this corpus. It and the encoded documents are cached in
the user's cache folder under a hash of the corpus, so a second run starts at once.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np

EXCLUDED_DIRS = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
VOCAB_SIZE = 384
EOS = "<|endoftext|>"


def documents() -> list[str]:
    """Read the source files in a fixed order, without the empty ones."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if EXCLUDED_DIRS.isdisjoint(p.parts))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in files)
    return [text for text in texts if text.strip()]


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return the training documents, and every fiftieth document, which is held out."""
    return [t for i, t in enumerate(texts) if i % 50], texts[::50]


def tokenizer(texts: list[str]):
    """Load the corpus's tokenizer from the cache, or train it."""
    from transformers import PreTrainedTokenizerFast

    path = _cached(texts, ".json", lambda unfinished: _train(texts).save(str(unfinished)))
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=EOS, bos_token=EOS)


def encoded(texts: list[str]) -> list[np.ndarray]:
    """Load the documents' token ids from the cache, or encode them; each ends with EOS."""

    def write(unfinished: Path) -> None:
        eos_token_id = tokenizer(texts).eos_token_id
        rows = [[*ids, eos_token_id] for ids in tokenizer(texts)(texts)["input_ids"]]
        ends = np.cumsum([len(row) for row in rows])
        with unfinished.open("wb") as file:
            np.savez(file, ids=np.concatenate(rows).astype(np.uint16), ends=ends)

    with np.load(_cached(texts, ".npz", write)) as stored:
        return np.split(stored["ids"].astype(np.int64), stored["ends"][:-1])


def _cached(texts: list[str], suffix: str, write: Callable[[Path], None]) -> Path:
    digest = hashlib.sha256("\0".join([str(VOCAB_SIZE), *texts]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nopad"
    path = cache / f"stdlib-{digest}{suffix}"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f"{suffix}.{os.getpid()}")  # ranks may race: one rename wins
        write(unfinished)
        unfinished.replace(path)
    return path


def _train(texts: list[str]):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe
