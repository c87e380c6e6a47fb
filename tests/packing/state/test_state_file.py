"""A state file is intact or rejected: every truncation, a thousand bit flips, every crash point."""

import json
import os
import random
import subprocess
import sys

import pytest
from nopad.packing.state import read_state, state_file, write_state
from nopad.packing.state.state_file import SIZE_LIMIT

STATE = {
    "version": 1,
    "position": {"index": 12},
    "shards": {"0": {"packs_since": 3, "state": "abc="}},
}
OLDER = {**STATE, "position": {"index": 8}}


@pytest.fixture
def path(tmp_path):
    write_state(tmp_path / "state.json", OLDER)
    write_state(tmp_path / "state.json", STATE)
    return tmp_path / "state.json"


def test_what_is_written_is_read_and_the_one_before_is_kept(path):
    assert read_state(path) == STATE
    assert read_state(path.with_name("state.json.previous")) == OLDER
    assert json.loads(path.read_text())["state"] == STATE


def test_every_truncation_is_noticed_and_falls_back(path):
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert read_state(path) == OLDER
        with pytest.raises(ValueError, match=r"state\.json"):
            read_state(path, fall_back=False)
    print(f"0 of {len(data)} truncations read in silence")


def test_a_thousand_bit_flips_are_noticed(path):
    data, rng, silent = path.read_bytes(), random.Random(0), 0
    for _ in range(1000):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(flipped))
        silent += read_state(path) != OLDER
    print(f"{silent} of 1000 bit flips read in silence")
    assert silent == 0


def test_two_torn_files_are_refused_naming_both(path):
    path.write_bytes(b'{"format"')
    path.with_name("state.json.previous").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"state\.json: truncated.*state\.json\.previous: truncated"
    ):
        read_state(path)


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_state(tmp_path / "none.json")


def test_a_torn_state_does_not_push_out_the_last_good_one(path):
    path.write_bytes(path.read_bytes()[:50])
    write_state(path, {"version": 1, "position": {"index": 16}})
    assert read_state(path.with_name("state.json.previous")) == OLDER


CRASH = """
import os, sys
from nopad.packing.state import state_file
point, path = int(sys.argv[1]), sys.argv[2]
calls = 0
def crashing(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == point:
            os._exit(9)
        return function(*args, **kwargs)
    return call
state_file.os.fsync = crashing(os.fsync)
state_file.os.link = crashing(os.link)
state_file.Path.replace = crashing(state_file.Path.replace)
state_file.fsync_path = crashing(state_file.fsync_path)
state_file.write_state(path, {"version": 1, "position": {"index": 99}})
print("finished")
"""


@pytest.mark.parametrize("point", range(1, 8))
def test_a_crash_at_any_point_of_saving_leaves_a_whole_state(path, point):
    command = [sys.executable, "-c", CRASH, str(point), str(path)]
    child = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    if child.returncode == 9:
        found = read_state(path)["position"]["index"]
        assert found in (12, 99)
    else:  # there are six points; the seventh is past the end
        assert child.returncode == 0 and child.stdout.strip() == "finished", child.stderr
        assert point == 7 and read_state(path)["position"]["index"] == 99


def test_a_file_over_the_limit_is_refused_naming_it(path):
    path.write_bytes(b" " * (SIZE_LIMIT + 1))
    with pytest.raises(ValueError, match=f"limit of {SIZE_LIMIT} bytes"):
        read_state(path, fall_back=False)
    with pytest.raises(ValueError, match="the limit is"):
        write_state(path, {"x": "y" * (SIZE_LIMIT + 1)})


def test_deep_nesting_is_refused_without_a_crash(path):
    path.write_bytes(b"[" * 200_000)
    with pytest.raises(ValueError, match=r"nested too deep|torn or corrupt"):
        read_state(path, fall_back=False)


def test_nothing_of_the_file_lies_outside_the_checksum(path):
    head, _, rest = path.read_text().partition('"state"')
    path.write_text(head + ' "state"' + rest)
    with pytest.raises(ValueError, match="checksum"):
        state_file.read_state(path, fall_back=False)
