"""States through loaders: torchdata's and Accelerate's own, and prefetched packs."""

import json
import textwrap

import pytest
import warm_python
from torch.utils.data import DataLoader

torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is missing")
StatefulDataLoader = torchdata.StatefulDataLoader

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = ("planned", "leveled", "sharded", "mixed")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_resumes_exactly(make, tools, kind, workers):
    def loader():
        data = make(kind, 1, 2, epochs=None, max_packs=120)
        return StatefulDataLoader(data, batch_size=None, num_workers=workers)

    whole = [tools.digest(pack) for pack in loader()]
    for cut in (1, 33) if workers else (0, 1, 6, 33, len(whole) - 1):
        assert tools.resumed(loader, cut) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_loader_prefetched_is_not_counted_as_seen(make, tools, kind):
    whole = tools.full(make(kind))
    data = make(kind)
    loader = iter(DataLoader(data, batch_size=None, num_workers=2, prefetch_factor=8))
    head = []
    for _ in range(5):
        pack = next(loader)
        head.append(tools.digest(pack))
        data.mark_trained(pack)
    state = json.loads(json.dumps(data.state_dict()))
    del loader
    again = make(kind)
    again.load_state_dict(state)
    tail = tools.full(DataLoader(again, batch_size=None, num_workers=1))
    assert head + tail == whole


def test_a_stream_refuses_a_step_that_leaves_a_pack_out(make):
    data = make("sharded")
    packs = iter(data)
    next(packs)
    with pytest.raises(ValueError, match="pack 1 was marked as trained, but pack 0 comes next"):
        data.mark_trained(next(packs))


def test_accelerates_stateful_loader_resumes_exactly(tmp_path):
    program = textwrap.dedent(
        """
        import sys
        import numpy as np, torch
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration
        from nopad.packing import PackedDataset, Sample
        from torchdata.stateful_dataloader import StatefulDataLoader
        rows = [np.full(5 + i % 17, i) for i in range(200)]
        def batches(loader):
            for pack in loader:
                yield pack["tokens"].tolist()
        def build():
            config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=False)
            accelerator = Accelerator(cpu=True, dataloader_config=config)
            data = PackedDataset(rows, budget=64, pool=8)
            collate = lambda pack: {"tokens": torch.from_numpy(pack.tokens)}
            loader = StatefulDataLoader(data, batch_size=None, collate_fn=collate)
            return accelerator, accelerator.prepare_data_loader(loader)
        accelerator, loader = build()
        whole = list(batches(loader))
        accelerator, loader = build()
        packs = batches(loader)
        head = [next(packs) for _ in range(9)]
        state = loader.state_dict()
        accelerator, loader = build()
        loader.load_state_dict(state)
        assert head + list(batches(loader)) == whole, (len(head), len(whole))
        print("finished")
        """
    )
    child = warm_python.run(["-c", program], timeout=300)
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.strip().endswith("finished")
