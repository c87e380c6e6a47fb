"""Files of examples: rows with a reference become examples, the first row without one is named."""

import json

import pytest
from nopad.trainer.evaluation import Example, read_examples


def test_rows_of_a_file_become_examples(tmp_path):
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    rows = [{"prompt": "a", "completion": "b"}, {"messages": turns}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_examples(path) == [Example("a", "b"), Example(turns[:1], "2")]
    path.write_text(path.read_text() + json.dumps({"text": "x" * 400}) + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 3: has no reference"):
        read_examples(path)
