"""Count the rows of a source while they are read, for a progress bar of the tokenization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..packing.encoding import Encoder
from ..packing.sources import Row, RowSource, TokenStore, WrappedSource, open_source


class CountedRows(WrappedSource):
    """A source that calls a function for every row that is read from it, in this process."""

    def __init__(self, source: RowSource, advance: Callable[[int], None]):
        super().__init__(source)
        self.advance = advance

    def read(self, shard, shards, cursor=None, shuffle_key=None) -> Iterator[Row]:
        for row in self.source.read(shard, shards, cursor, shuffle_key):
            self.advance(1)
            yield row

    def ranges(self, count: int) -> None:
        """Return none: other processes would read them."""

    def cache_key(self) -> None:
        """Return none: cached rows are not read, so they would not be counted."""


def open_counted(
    data: str,
    tokenizer: Any,
    options: dict[str, Any],
    advance: Callable[[int], None],
) -> Any:
    """Open data for `PackedDataset`; rows that are read are counted, ready tokens are not.

    options: those of `data_kwargs`.
    """
    encoder = Encoder(tokenizer, add_eos=options["add_eos"])
    opened = open_source(
        data,
        text_column=options["text_column"],
        eos_token_id=encoder.eos_token_id,
        glob=options["glob"],
        dtype=options["dtype"],
    )
    return TokenStore(opened) if isinstance(opened, list) else CountedRows(opened, advance)
