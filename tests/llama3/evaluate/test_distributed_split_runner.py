"""A model that is split over processes generates what one process does, and ends when one of them does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import pytest
import torch

from herd.llama3.evaluate.distributed import RankJob, SplitRunner, run_rank
from herd.llama3.evaluate.generate import Sampler, generate
from herd.llama3.model.files import save_model
from herd.llama3.model.transformer import Transformer
from herd.llama3.parallel.layout import Layout
from herd.llama3.recipe.sections import Model
from herd.llama3.serve.engine import BatchEngine, QueueFull
from herd.storage.processes import free_port
from tests.dist import forkserver
from tests.llama3.evaluate.test_generate_batch import TOKENIZER, made
from tests.llama3.serve.test_engine import WAIT_S, Text, await_idle, check_likelihoods

SPEC = Model(layers=2, dim=32, ffn=48, heads=4, kv_heads=2, max_seq_len=96, tied_embeddings=False)


def be_rank(caller: Connection, rank: int, size: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    run_rank(caller)


class ForkedRanks:
    """As `InferenceRanks`, without the imports."""

    def __init__(self, size: int) -> None:
        port = free_port()
        self.connections, self.processes = [], []
        for rank in range(size):
            ours, theirs = forkserver().Pipe()
            process = forkserver().Process(target=be_rank, args=(theirs, rank, size, port), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    @property
    def alive(self) -> bool:
        return all(process.exitcode is None for process in self.processes)

    def failure(self) -> Exception:
        time.sleep(0.5)
        return RuntimeError(f"ended: {[process.exitcode for process in self.processes]}")


@contextmanager
def split(model: Transformer, folder: Path, layout: Layout) -> Iterator[tuple[SplitRunner, ForkedRanks]]:
    save_model(folder, model.config, TOKENIZER.vocab_size, model.state_dict())
    ranks = ForkedRanks(layout.model_parallel)
    try:
        yield SplitRunner(ranks, RankJob(folder, layout, torch.float32, "cpu", 1)), ranks
    finally:
        for process in ranks.processes:
            process.kill()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(tp=2, pp=2), id="tp2 pp2"),
        pytest.param(Layout(pp=4), id="ends without layers", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_texts_that_come_and_go_are_those_of_one_process(layout: Layout, tmp_path: Path) -> None:
    """Sampled, penalized, stopped and canceled ones, and one that exceeds the window."""
    model, dice = made(SPEC), Random(1)
    with split(model, tmp_path, layout) as (runner, ranks):
        assert generate(runner, TOKENIZER, "abc", 110, 1.0) == generate(model, TOKENIZER, "abc", 110, 1.0)
        engine, texts, canceled = BatchEngine(runner, TOKENIZER, max_batch=4, queue=1000), [], []
        for number in range(14):
            prompt = "abc 123"[: number % 3] + "".join(dice.choice("abc 123") for _ in range(dice.randint(0, 30)))
            stop = tuple("abcdefghijklmnop") if number % 4 == 0 else ()
            scored = {"top": number % 4, "echo": number % 2 == 1} if number % 3 else {}
            text = Text(prompt, dice.randint(1, 30), dice.choice([0.0, 1.0, 1.5]), number, stop, **scored)
            if number % 5 == 0:
                text.options = (*text.options, 20, 1.3)
                sampler = text.generation.sampler
                text.generation.sampler = Sampler(sampler.base, sampler.end, *text.options[2:4], 20, 1.3)
            texts.append(text)
            engine.submit([text.generation])
            if number % 6 == 5:
                canceled.append(text)
                text.delivered.get(timeout=WAIT_S)
                engine.cancel(text.generation)
            time.sleep(dice.random() * 0.01)
        reasons = set()
        for text in texts:
            if text not in canceled:
                whole, reason = text.wait()
                assert whole == generate(model, TOKENIZER, *text.options)
                reasons.add(reason)
                if text.generation.top is not None:
                    check_likelihoods(model, text.generation)
        assert reasons == {"stop", "length"}
        await_idle(engine)
        engine.stop()
        assert ranks.alive
        assert runner.failure() is None


def test_a_rank_that_dies_ends_all_texts_and_the_engine(tmp_path: Path) -> None:
    with split(made(SPEC), tmp_path, Layout(tp=2)) as (runner, ranks):
        engine = BatchEngine(runner, TOKENIZER, max_batch=1)
        texts = [Text("a", 90), Text("b", 90)]
        engine.submit([text.generation for text in texts])
        texts[0].delivered.get(timeout=WAIT_S)
        os.kill(ranks.processes[0].pid, signal.SIGSTOP)  # with NCCL it would wait for the other
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        assert [text.wait()[1] for text in texts] == ["error", "error"]
        assert str(runner.failure()) == "ended: [None, -9]"
        deadline = time.monotonic() + WAIT_S
        while engine.alive:  # `/health` tells
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(QueueFull):
            engine.submit([Text("c", 1).generation])
        with pytest.raises(RuntimeError, match="-9"):
            generate(runner, TOKENIZER, "a", 2)


def test_an_idle_model_notices_the_end_of_a_rank_and_so_does_one_that_loads(tmp_path: Path) -> None:
    with split(made(SPEC), tmp_path, Layout(tp=2)) as (runner, ranks):
        assert runner.failure() is None
        ranks.processes[0].kill()
        ranks.processes[0].join()
        assert "-9" in str(runner.failure())
    (tmp_path / "model.safetensors").write_bytes(b"")
    ranks = ForkedRanks(2)
    with pytest.raises(RuntimeError, match=r"ended: \[1, 1\]"):
        SplitRunner(ranks, RankJob(tmp_path, Layout(tp=2), None, "cpu", 1))
