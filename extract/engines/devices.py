"""Which GPUs each of several servers gets."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace

from extract.config import Server
from extract.engines.sglang_command import data_parallel_groups, installed_sglang
from extract.launcher import child_environment

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHIFTS = ("base_gpu_id", "gpu_id_step")


def replicas_of(server: Server, env: Mapping[str, str]) -> list[Server]:
    """`server.replicas` servers of one each, on GPUs of their own (tp_size x dp_size each) where they run on GPUs.

    `env` is the hardware's. CUDA_VISIBLE_DEVICES in server.env, there, or in our own environment says which there are.

    Raises:
        ValueError: there are too few, or flags place servers by themselves.
    """
    count = server.replicas
    if count == 1:
        return [server]
    flags = {key.replace("-", "_"): value for key, value in (server.flags | _capture_flags(server)).items()}
    if flags.get("device") == "cpu":
        return [replace(server, replicas=1)] * count
    if told := [key for key in SHIFTS if flags.get(key) is not None]:
        raise ValueError(f"server.flags.{told[0]} contradicts server.replicas={count}, which places them; leave it out")
    each, visible = _ranks(server), _visible(server, env)
    if len(visible) < count * each:
        raise ValueError(
            f"server.replicas={count} of {each} GPUs each need {count * each}, and {len(visible)} are visible "
            f"({','.join(visible) or 'none'}); lower server.replicas or tp_size, or set {VISIBLE}"
        )
    return [
        replace(server, replicas=1, env=server.env | {VISIBLE: ",".join(visible[start : start + each])})
        for start in range(0, count * each, each)
    ]


def _ranks(server: Server) -> int:
    """GPUs of one server, in whichever of its lives has more."""
    assert server.capture is not None
    answering = replace(server, capture=replace(server.capture, flags={}))
    return max(data_parallel_groups(one)[1] for one in (server, answering))


def _visible(server: Server, env: Mapping[str, str]) -> list[str]:
    told = {**os.environ, **env, **server.env}.get(VISIBLE)
    if told is None:
        return [str(number) for number in range(_count(server, env))]
    names = [name.strip() for name in str(told).split(",")]
    hidden = next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))
    return names[:hidden]  # as CUDA reads it


def _count(server: Server, env: Mapping[str, str]) -> int:
    """Asks the torch that SGLang will use: ours may be one for a CPU."""
    python, _ = installed_sglang(server)
    told = child_environment({**env, **{key: str(value) for key, value in server.env.items()}})
    look = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([python, "-c", look], env=told, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"server.python={server.python} cannot count GPUs:\n{done.stderr}".rstrip())
    return int(done.stdout)


def _capture_flags(server: Server) -> dict[str, object]:
    assert server.capture is not None, "checked by Server"
    return server.capture.flags
