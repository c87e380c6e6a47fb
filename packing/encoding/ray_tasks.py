"""Write the shards of a corpus in the tasks of a Ray cluster.

Ray schedules the tasks, repeats those whose process or node died, and moves rows to them. The job
is put into its object store once, and every process of the cluster keeps it for its next tasks.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import Any

from ..preparation_progress import TokenProgress
from .shard_job import Job, ShardProgress, shard_tasks, write_shard

RETRIES = 10
"""Attempts after a task's process or node died; an error of the task itself is not repeated."""
_jobs: dict[Any, Job] = {}


def run_tasks(
    job: Job,
    records: dict[int, dict],
    missing: list[int],
    processes: int | None,
    progress: TokenProgress,
) -> None:
    """Write shards in Ray tasks; `records` gets theirs.

    processes: tasks at a time. Default: all of them, which Ray queues; if rows are sent, two for
        each CPU of the cluster.
    """
    try:
        import ray
    except ImportError:
        raise ImportError('engine="ray" needs Ray: pip install "nopad[ray]"') from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    write = ray.remote(num_cpus=1, max_retries=RETRIES)(_write)
    reference = [ray.put(job)]  # in a list: a task gets it unresolved, and its process keeps it
    if processes is None and job.ranges is None:
        processes = 2 * int(ray.cluster_resources().get("CPU", 1))
    tasks, shown = shard_tasks(job, records, missing), ShardProgress(job, records, progress)
    running: dict[Any, int] = {}
    try:
        while True:
            free = None if processes is None else processes - len(running)
            for number, rows in islice(tasks, free):
                running[write.remote(reference, number, rows)] = number
            if not running:
                return
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            shown.add(running.pop(done), ray.get(done))
            shown.show()
    except ray.exceptions.RayError as error:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if isinstance(cause, ValueError | OSError):
            raise cause from None
        raise OSError(f"a Ray task failed: {' '.join(str(cause).split())[:300]}") from None
    finally:
        for task in running:
            ray.cancel(task, force=True)


def _write(reference: list, number: int, rows: Any) -> dict:
    import ray

    if reference[0] not in _jobs:
        os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        _jobs.clear()
        _jobs[reference[0]] = ray.get(reference[0])
    return write_shard(_jobs[reference[0]], number, rows)
