"""Typed settings of the verifier's side: hardware, verifier, server, extraction. Values live in `conf/`, never here.

Fields have no defaults on purpose: `conf/` is the only place where a value is chosen, and a key missing there is an
error. Each field is documented where it is declared, and its range is part of its type.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError


def _no_bool(value: Any) -> Any:
    """Python counts True as 1; a setting does not."""
    if isinstance(value, bool):
        raise PydanticCustomError("bool_for_number", "Input should be a number")
    return value


STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
PositiveInt = Annotated[Int, Field(gt=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(gt=0, le=1)]
NonEmpty = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, config=STRICT)
class Hardware:
    accelerator: Literal["cpu", "cuda"]
    """Where the verifier runs in process, and where the drafter trains."""
    devices: PositiveInt
    """Processes of a training, one a device."""
    strategy: Literal["auto", "ddp", "fsdp"]
    """`auto` is one process, the others need devices > 1. `ddp`: each holds the whole drafter and its optimizer state;
    `fsdp`: each holds a part of them (FSDP2), for drafters that do not fit otherwise."""
    precision: Literal["32-true", "bf16-mixed"]
    """Matrix products of the drafter's training. Weights and optimizer state are float32 either way."""
    micro_rows: PositiveInt
    """Packed rows in one forward and backward; gradients accumulate over `optimizer.batch_tokens`."""
    num_workers: Annotated[Int, Field(ge=0)]
    """Loader processes. 0 reads the store in the training process."""
    threads: PositiveInt | None
    """CPU threads of torch; null leaves torch's own choice."""
    env: dict[str, str]
    """Environment set before the first CUDA or NCCL call, e.g. NCCL_PROTO."""
    flags: dict[Literal["sglang", "vllm"], dict[str, Any]]
    """Flags that an engine's server needs on this hardware, by engine; server.flags count more."""

    def __post_init__(self) -> None:
        if (self.devices > 1) == (self.strategy == "auto"):
            raise ValueError(
                f"hardware.devices={self.devices} contradicts hardware.strategy={self.strategy}: "
                "use auto for one device, ddp or fsdp for several"
            )


@dataclass(frozen=True, config=STRICT)
class Verifier:
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """Short name, used in directory names, tables and W&B tags."""
    path: NonEmpty
    """A Hugging Face directory, a hub id, a .gguf file, or package:NAME/FILE.gguf inside an installed package."""
    revision: str | None
    """Commit or tag on the hub; null is the default branch."""
    chat_template: str | None
    """A .jinja file that replaces the tokenizer's chat template; null keeps the stock one."""
    trust_remote_code: bool
    """Runs Python code that comes with the weights. Leave false unless you have read that code."""
    capture_layers: list[Int] | None
    """Three layers k in 1..n-1, each the residual stream after k decoder layers; null is [2, n//2, n-3]."""
    dtype: Literal["bfloat16", "float32"]
    """Of the verifier's weights while it answers and while its states are captured."""


@dataclass(frozen=True, config=STRICT)
class PhaseTimeouts:
    """Seconds that each phase of a server's start may take, as its log tells them."""

    process: PositiveFloat
    """Interpreter and imports."""
    distributed: PositiveFloat
    """Ranks find each other."""
    weights: PositiveFloat
    """They are read and spread over the ranks."""
    kv_cache: PositiveFloat
    """Memory for it is taken."""
    graphs: PositiveFloat
    """CUDA graphs are captured, kernels compiled."""
    ready: PositiveFloat
    """Warm-up."""


@dataclass(frozen=True, config=STRICT)
class Capture:
    """How a server hands over hidden states."""

    concurrency: PositiveInt
    """Requests under way at once, of answers and of states."""
    flags: dict[str, Any]
    """On top of server.flags, while states are captured."""
    spool: NonEmpty
    """A folder in memory (tmpfs) through which states go."""
    spool_mib: PositiveInt
    """Memory that they may take there, for each server: at least a few sequences of extraction.max_len."""
    phase_timeouts_s: PhaseTimeouts
    """Each phase of a start has a deadline of its own."""


@dataclass(frozen=True, config=STRICT)
class Speculation:
    """How a server drafts, where serve.py gives it a drafter."""

    steps: PositiveInt
    """Tokens that a chain of drafts is long."""
    topk: PositiveInt
    """Drafts kept at each step; 1 is one chain, more a tree (sglang)."""
    draft_tokens: Annotated[Int, Field(ge=2)] | None
    """Tokens in one verification, the verifier's own included; null is steps + 1, all of one chain."""

    def __post_init__(self) -> None:
        if self.topk == 1:
            if self.draft_tokens not in (None, self.steps + 1):
                raise ValueError(
                    f"server.speculation.draft_tokens={self.draft_tokens} contradicts steps={self.steps} with topk=1: "
                    f"one chain is {self.steps + 1} tokens, the verifier's own included; leave draft_tokens null"
                )
            return
        most = 1 + self.topk + (self.steps - 1) * self.topk**2
        if self.draft_tokens is None or not self.steps < self.draft_tokens <= most:
            raise ValueError(
                f"server.speculation.draft_tokens={self.draft_tokens} contradicts steps={self.steps} with "
                f"topk={self.topk}: such a tree has {most} tokens, and a chain through it {self.steps + 1}; choose "
                "between these"
            )

    @property
    def verified(self) -> int:
        """Tokens in one verification."""
        return self.draft_tokens or self.steps + 1


@dataclass(frozen=True, config=STRICT)
class Server:
    engine: Literal["inprocess", "vllm", "sglang"]
    """What runs the verifier. `inprocess`: transformers in this process; `vllm`, `sglang`: a server in its own
    environment."""
    python: str | None
    """Interpreter of an engine with its own environment; inprocess has none."""
    env: dict[str, str | Int | Float]
    """Environment of the engine's processes."""
    flags: dict[str, Any]
    """Command-line flags of the engine: true is the bare flag, false its --no- form, null leaves it out."""
    start_timeout_s: PositiveFloat | None
    """Seconds from the start of a server until it is ready; then it is stopped and its log shown."""
    request_timeout_s: PositiveFloat | None
    """Seconds for one answer of a server; then it counts as hung."""
    replicas: PositiveInt
    """Servers that share one extraction, each with GPUs of its own: sglang."""
    urls: list[Annotated[str, Field(pattern=r"^http://[\w.-]+:\d+$")]]
    """Running capture servers of this machine that are used instead of starting any: sglang."""
    capture: Capture | None
    """Of a server that captures hidden states: sglang."""
    speculation: Speculation | None
    """Of a server that decodes with a drafter; null: it never does."""

    def __post_init__(self) -> None:
        self._check_several()
        if (self.engine == "sglang") != (self.capture is not None):
            raise ValueError(
                f"server.engine={self.engine} {'takes no' if self.capture else 'needs'} server.capture; "
                f"server={self.engine} sets what it takes"
            )
        needed = {"python": self.python, "start_timeout_s": self.start_timeout_s,
                  "request_timeout_s": self.request_timeout_s}  # fmt: skip
        if self.engine == "inprocess":
            own = {"env": self.env, "flags": self.flags, "speculation": self.speculation}
            told = [key for key, value in (needed | own).items() if value]
            if told:
                raise ValueError(
                    f"server.engine=inprocess runs in this process and takes no server.{', server.'.join(told)}"
                )
        elif missing := [key for key, value in needed.items() if not value]:
            raise ValueError(
                f"server.engine={self.engine} is a process of its own and needs server.{', server.'.join(missing)}; "
                f"server={self.engine} sets them, and `make {self.engine}-env` makes the interpreter"
            )
        elif self.engine == "vllm" and self.speculation and self.speculation.topk > 1:
            raise ValueError(
                f"server.speculation.topk={self.speculation.topk}: vLLM drafts one chain; use topk=1, or server=sglang"
            )

    def _check_several(self) -> None:
        several = [key for key, told in (("replicas", self.replicas > 1), ("urls", bool(self.urls))) if told]
        if several and self.engine != "sglang":
            raise ValueError(f"server.engine={self.engine} takes no server.{', server.'.join(several)}; sglang does")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"server.urls={self.urls} names a server twice")
        chosen = {"replicas": self.replicas > 1, "flags": self.flags, "env": self.env,
                  "capture.flags": self.capture and self.capture.flags}  # fmt: skip
        if self.urls and (told := [key for key, value in chosen.items() if value]):
            raise ValueError(
                f"server.urls names servers that run already, and contradicts server.{', server.'.join(told)}, which "
                "are for servers to be started; leave one of them out"
            )


def on_hardware(server: Server, hardware: Hardware) -> Server:
    """The server with the flags that its engine needs on this hardware; those that it has itself count more."""
    if server.engine == "inprocess" or server.engine not in hardware.flags or server.urls:
        return server  # one that runs already has its flags
    chosen = {key.replace("-", "_") for key in server.flags}
    needed = {key: value for key, value in hardware.flags[server.engine].items() if key.replace("-", "_") not in chosen}
    return replace(server, flags=needed | server.flags)


@dataclass(frozen=True, config=STRICT)
class Extraction:
    prompts: NonEmpty
    """JSONL, ShareGPT-style JSON, parquet, or hf:ORG/NAME. Relative paths start at the working directory."""
    split: str | None
    """Split of a Hugging Face dataset."""
    limit: PositiveInt | None
    """Read at most so many conversations; null is all."""
    system_prompt: str | None
    """Put in front of conversations that have no system message."""
    responses: Literal["generate", "keep"]
    """generate: the verifier answers (what a drafter should learn). keep: answers in the data are kept as they are."""
    max_new_tokens: PositiveInt
    """Of each generated answer."""
    temperature: NonNegativeFloat
    """0 is greedy. Acceptance length is defined on greedy responses only."""
    top_p: Share
    """Nucleus of sampling; 1 when greedy."""
    max_len: Annotated[Int, Field(ge=8)]
    """Longest sample in tokens, and the length of a packed row in training."""
    concurrency: PositiveInt
    """Answers generated at once."""
    capture_tokens: PositiveInt
    """Tokens in one capturing forward pass."""
    dtype: Literal["bfloat16", "float32"]
    """Of the stored hidden states."""
    codec: Literal["none", "fp8"]
    """Of the captured layers in the store. fp8: e4m3 with a scale a token and layer; the final state
    keeps `dtype`, so a bf16 store takes 5/8 of the bytes."""
    shard_mib: Annotated[Int, Field(ge=1, le=1024)]
    """Size of a store shard. Memory holds three at most: one that fills, two that are written. A crash loses these, and
    they are captured again."""

    def __post_init__(self) -> None:
        if self.temperature == 0 and self.top_p != 1:
            raise ValueError(
                f"extraction.top_p={self.top_p} contradicts extraction.temperature=0: greedy decoding has no nucleus; "
                "set top_p to 1 or a temperature above 0"
            )
        if self.max_new_tokens >= self.max_len:
            raise ValueError(
                f"extraction.max_new_tokens={self.max_new_tokens} leaves no room for a prompt in "
                f"extraction.max_len={self.max_len}"
            )
