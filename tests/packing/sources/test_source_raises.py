"""A source that raises midway: nothing read is lost, and the fixed one continues at that row."""

import json

import numpy as np
import pytest
from nopad.packing import PackedDataset


class Trouble(Exception):
    pass


def rows_until(fail):
    for i in range(200):
        if i == fail:
            raise Trouble("the disk is gone")
        yield np.full(1 + i % 13, i)


@pytest.mark.parametrize("shuffle", [False, 16])
def test_a_generator_that_raises_at_any_row_is_continued_from_there(tools, shuffle):
    def make(fail):
        return PackedDataset(lambda: rows_until(fail), budget=32, pool=6, shards=1, shuffle=shuffle)

    whole = [tools.digest(pack) for pack in make(None)]
    wrong = 0
    for fail in [*range(12), *range(12, 200, 7)]:
        data, seen = make(fail), []
        with pytest.raises(RuntimeError, match=f"row {fail}: Trouble"):
            for pack in data:
                seen.append(tools.digest(pack))
        state = json.loads(json.dumps(data.state_dict()))
        fixed = make(None)
        if fail == 0:  # the only row that a fingerprint reads
            fixed.fingerprint = data.fingerprint
        fixed.load_state_dict(state)
        wrong += seen + [tools.digest(pack) for pack in fixed] != whole
        if not shuffle and fail > 30:
            assert len(seen) >= sum(1 + i % 13 for i in range(fail)) // 32 - 6
    print(f"{wrong} failures lost or repeated something (shuffle={shuffle})")
    assert wrong == 0


def test_an_error_is_raised_again_for_skip_since_nothing_can_follow_it():
    data = PackedDataset(lambda: rows_until(5), budget=32, on_error="skip", shards=1)
    with pytest.raises(RuntimeError, match="row 5"):
        list(data)
