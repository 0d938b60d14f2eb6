"""A job of three ranks on gloo: a router, one worker that prefills, one that decodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

import pdlab
from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.child.job import Meeting
from pdlab.disagg.hosts.host import WorkerDied
from pdlab.disagg.hosts.ranks import _parser, _specs, rank_cluster, serve_rank
from pdlab.disagg.hosts.spec import TransportSpec, WorkerSpec
from pdlab.parallel.command_line import prompt_of

NAME = "random:tiny-llama"
PROMPTS = [[3 + (7 * i + n) % 50 for i in range(n)] for n in (1, 16, 33)]
PATIENCE_S = 120.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
MODULE = "pdlab.disagg.hosts.ranks"


def arguments(num_tokens: int, *more: str) -> list[str]:
    texts = [",".join(map(str, prompt)) for prompt in PROMPTS]
    fixed = ["--model", NAME, "--exact", "--json", "--ignore-eos", "--max-tokens", str(num_tokens)]
    return [*fixed, *more, "--", *texts]


def alone(num_tokens: int) -> list[list[int]]:
    """What one engine puts out."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    with Engine(pdlab.load(NAME, progress=False), EngineConfig(exact=True)) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, params)]


def environment(**own: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", **own}


@contextmanager
def ranks_without_torchrun(args: list[str]) -> Iterator[list[subprocess.Popen]]:
    """Three ranks that nobody ends when one of them dies."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    try:
        for rank in range(3):
            own = {"RANK": str(rank), "WORLD_SIZE": "3"}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", MODULE, *args],
                    env=environment(**own, **meeting),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_torchrun_gives_the_tokens_of_one_engine() -> None:
    run = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "3", "-m", MODULE, *arguments(6)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert [output["token_ids"] for output in said["outputs"]] == alone(6)
    assert [record["num_tokens"] for record in said["transfers"]] == [1, 16, 33]
    assert {record["transport"] for record in said["transfers"]} == {"torch.distributed (gloo)"}
    assert {(r["source"], r["target"]) for r in said["transfers"]} == {("p0", "d0")}
    assert not said["failures"]


def test_a_rank_that_is_killed_is_named_and_the_others_go_on() -> None:
    with ranks_without_torchrun(arguments(150, "--stream")) as ranks:
        router, _, decoder = ranks
        wait_until_decoding(router)
        decoder.send_signal(signal.SIGKILL)
        out, err = router.communicate(timeout=PATIENCE_S)
        assert router.returncode == 0, err
        said = json.loads(out.splitlines()[-1])
        assert [output["token_ids"] for output in said["outputs"]] == alone(150)
        [failure] = said["failures"]
        assert failure["worker"] == "d0"
        assert "rank 2" in failure["reason"]
        assert "worker d0 is lost" in err
        for process in ranks[1:]:
            process.wait(PATIENCE_S)


def test_when_the_router_is_killed_its_workers_end() -> None:
    with ranks_without_torchrun(arguments(400, "--stream")) as ranks:
        wait_until_decoding(ranks[0])
        ranks[0].send_signal(signal.SIGKILL)
        for process in ranks:
            process.wait(PATIENCE_S)


def test_under_torchrun_a_dead_rank_is_named_and_all_end() -> None:
    command = [*TORCHRUN, "--nproc-per-node", "3", "-m", MODULE, *arguments(400, "--stream")]
    with subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            worker = child_with(job.pid, "RANK=1")
            wait_until_decoding(job)
            os.kill(worker, signal.SIGKILL)
            _, err = job.communicate(timeout=PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode != 0
    # by the router, or, where torchrun was quicker to end it, by torchrun
    assert re.search(r"worker p0 is lost: rank 1|rank +: 1 \(local_rank: 1\)", err), err


def meeting_of(store: dist.Store, rank: int) -> Meeting:
    return Meeting(store, rank, 2, "127.0.0.1")


def test_a_worker_that_cannot_be_made_says_why() -> None:
    store = dist.HashStore()
    told = {"init_method": "env://", "rank": 0, "world_size": 1}
    spec = WorkerSpec("w0", TransportSpec("torch", told), model="random:none")
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(serve_rank, spec, meeting_of(store, 1))
        with pytest.raises(WorkerDied, match=r"worker w0 is lost: rank 1: [\s\S]*'none'"):
            rank_cluster(pdlab.load(NAME, progress=False), [spec], meeting_of(store, 0))
        assert isinstance(worker.exception(PATIENCE_S), ValueError)
    with pytest.raises(ValueError, match="specs has 3 for 1 ranks"):
        rank_cluster(pdlab.load(NAME, progress=False), [spec] * 3, meeting_of(store, 0))


def test_bad_arguments_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"RANK|WORLD_SIZE"):
        Meeting.join()
    meeting = meeting_of(dist.HashStore(), 0)
    with pytest.raises(ValueError, match="--prefill is 5; it must be from 0 to 0"):
        _specs(_parser().parse_args(["--prefill", "5"]), meeting)
    [both] = _specs(_parser().parse_args(["--prefill", "0"]), meeting)
    assert (both.name, both.role) == ("b0", "both")
    with pytest.raises(ValueError, match=r"'one two' must be token ids"):
        prompt_of("one two", pdlab.load(NAME, progress=False))


def wait_until_decoding(router: subprocess.Popen) -> None:
    """Until a request has its second token, which is the decode worker's first."""
    assert router.stdout is not None
    seen: set[str] = set()
    for line in router.stdout:
        request_id = line.split()[0]
        if request_id in seen:
            return
        seen.add(request_id)
    raise AssertionError("the router's output has ended")


def child_with(parent: int, variable: str) -> int:
    """The process under another one that has this in its environment."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                if int(path.read_text().rpartition(")")[2].split()[1]) != parent:
                    continue
                variables = (path.parent / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if variable.encode() in variables:
                return int(path.parent.name)
        time.sleep(0.05)
    raise AssertionError(f"no process under {parent} has {variable}")
