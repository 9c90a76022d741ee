"""Small stores for tests: seeded samples whose states can be told apart, and processes that die while writing."""

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from extract.store import Store, StoredSample, create_or_resume

HIDDEN = 8
LAYERS = [1, 2, 4]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def manifest(*, dtype: str = "bfloat16", codec: str = "none", **must_match: object) -> dict:
    return {
        "last": "post_norm",
        "dtype": dtype,
        "codec": codec,
        "capture_layers": LAYERS,
        "hidden_size": HIDDEN,
        "must_match": {"verifier": {"sha256": "v1"}, "max_len": 64, **must_match},
    }


def sample(number: int, tokens: int, *, dtype: str = "bfloat16", hidden: int = HIDDEN) -> StoredSample:
    """Sample `number`: the same states for the same arguments, other states for any other number."""
    generator = torch.Generator().manual_seed(number)
    states = torch.randn(tokens, (len(LAYERS) + 1) * hidden, generator=generator).to(DTYPES[dtype])
    return StoredSample(
        id=f"s{number}",
        conversation=f"c{number // 2}",
        temperature=0.0 if number % 3 else 0.7,
        input_ids=torch.randint(0, 100, (tokens,), generator=generator).tolist(),
        loss_mask=torch.randint(0, 2, (tokens,), generator=generator).tolist(),
        aux=states[:, : len(LAYERS) * hidden].contiguous(),
        last=states[:, len(LAYERS) * hidden :].contiguous(),
    )


def samples(lengths: Iterable[int], *, dtype: str = "bfloat16") -> list[StoredSample]:
    return [sample(number, tokens, dtype=dtype) for number, tokens in enumerate(lengths)]


def write_store(
    path: Path, what: Sequence[StoredSample], *, shard_bytes: int = 2000, dtype: str = "bfloat16", codec: str = "none"
) -> None:
    """A complete store of these samples; what is on disk already is left as it is, as a resumed extraction does."""
    with create_or_resume(path, manifest(dtype=dtype, codec=codec), shard_bytes=shard_bytes) as writer:
        for one in what:
            if one.id not in writer.done:
                writer.add(one)
        writer.finish([one.id for one in what])


def assert_holds(store: Store, what: Sequence[StoredSample]) -> None:
    """The store has these samples, each once, with every bit of them."""
    assert sorted(ref.id for ref in store.samples) == sorted(one.id for one in what)
    refs = {ref.id: ref for ref in store.samples}
    for one in what:
        ref, found = refs[one.id], store.read(refs[one.id], ("aux", "last", "input_ids", "loss_mask"))
        assert (ref.conversation, ref.temperature, ref.tokens) == (
            one.conversation,
            one.temperature,
            len(one.input_ids),
        )
        assert ref.supervised == sum(one.loss_mask)
        assert found["input_ids"].tolist() == list(one.input_ids)
        assert found["loss_mask"].tolist() == list(one.loss_mask)
        assert torch.equal(found["aux"], one.aux)
        assert torch.equal(found["last"], one.last)


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; its exit status, -9 if it was killed."""

    def single_threaded() -> None:
        torch.set_num_threads(1)  # the parent's thread pool does not live on in a fork: waiting for it hangs
        work()

    process = multiprocessing.get_context("fork").Process(target=single_threaded)
    process.start()
    process.join(30)
    if process.exitcode is None:
        process.kill()
        raise AssertionError("the child hangs")
    return process.exitcode
