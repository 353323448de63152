"""From a file to a `Model`: read, plan, pick an executor, pack the weights, build tokenizer and template.

Nothing is kept of a load that fails; every refusal names the file and what is wrong with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from pantheon import seams, settings
from pantheon.accel.cuda import faults
from pantheon.accel.die import count_by_bus, cuda_missing
from pantheon.accel.executor import Executor, Progress, RawTensor, Runner
from pantheon.engine.model import Model
from pantheon.engine.sampler import NewDraw
from pantheon.engine.scripted import PREFIX as SCRIPT
from pantheon.engine.scripted import load_script
from pantheon.errors import BadRequest, ModelFileError, PantheonError
from pantheon.formats.gguf import GGUFFile, open_gguf
from pantheon.log import fields, logger
from pantheon.models.architectures import make_plan
from pantheon.plan.builder import Plan
from pantheon.plan.state_spec import KVType
from pantheon.text.chat_template import CHATML, ChatTemplate
from pantheon.text.tokenizer import Tokenizer, load_tokenizer

log = logger("load")

#: Context when none is asked for: the model's own, but no more than this [MR_ADMIT_CTX_GUESS, M059].
DEFAULT_CTX = 8192
#: no limit of ours: what the memory can not hold is refused with the numbers [B46]
MAX_CTX = 1 << 40
MAX_THREADS = 1024
_PRECISE = {"F32", "F16", "BF16"}


class GGUFWeights:
    """WeightSource over an open file."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def tensor(self, name: str) -> RawTensor:
        """The blocks of one tensor."""
        info = self._file.tensors.get(name)
        if info is None:
            raise ModelFileError(self._file.path, f"tensor {name} is missing", param=name)
        return RawTensor(name, info.type.name, info.shape, self._file.data(name))

    def release(self, name: str) -> None:
        """Drop the pages of one tensor."""
        self._file.release(name)


class BrokenTemplate:
    """Stands for a chat template that does not compile: chat answers say why, everything else works."""

    name = "broken"

    def __init__(self, source: str, fault: PantheonError) -> None:
        self.source, self.fault = source, fault

    def render(self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """Raises the compile fault."""
        raise self.fault


def load_model(
    path: str | Path,
    *,
    ctx: int | None = None,
    executor: str = "cpu",
    threads: int | None = None,
    kv_type: str | None = None,
    template: str | None = None,
    progress: Progress | None = None,
    dies: Sequence[int] = (0,),
    cuts: Sequence[int] = (),
) -> Model:
    """Load a GGUF file (or `script:FILE.json`).

    ctx: positions a conversation may have (default: the model's own, at most 8192).  executor: "cpu", "cuda" or
    "reference".  threads: default = physical cores.  dies, cuts: for "cuda", see CudaExecutor.  kv_type: "f32", "f16",
    "q8_0" or "q4_0"; default f16 for quantised weights, f32 otherwise; q4_0 when QWEN35_KV_Q4 is set.  template: Jinja
    source of a chat template to use instead of the file's.

    Raises ModelFileError, ModelConfigError or BadRequest; each names what is at fault; and for a device that fails
    PantheonError 507 or 503, which names the die.
    """
    seams.hit("load")
    if str(path).startswith(SCRIPT):
        return load_script(str(path))
    die = pick_executor(executor, threads, dies, cuts)
    if executor == "cuda":
        _need_cuda()
    with open_gguf(path) as file:
        plan = plan_of(file)
        tokenizer = tokenizer_of(file, plan)
        n_ctx = pick_ctx(ctx, plan)
        if n_ctx > plan.n_ctx_train:
            log.warning("context beyond the trained one %s", fields(ctx=n_ctx, trained=plan.n_ctx_train))
        kv = pick_kv_type(kv_type, executor, file, plan)
        if executor != "cuda":
            check_memory(plan, n_ctx, kv, weights=packed_bytes(die, file, plan, n_ctx, kv))
        seams.hit("upload")
        with on_dies(executor, dies):
            runner = _upload(die, plan, file, n_ctx, kv, progress)
        chat_template = template_of(file, tokenizer, template)
        name, arch = model_name(file), str(file.metadata["general.architecture"])
    try:
        with on_dies(executor, dies):
            runner.warm_up(progress)
    except BaseException:
        runner.close()
        raise
    return Model(
        name=name, path=Path(path), architecture=arch, plan=plan, runner=runner,
        tokenizer=tokenizer, template=chat_template, n_ctx=n_ctx, new_draw=_new_draw(executor),
    )  # fmt: skip


def _need_cuda() -> None:
    """Raise BadRequest unless CUDA dies can be used; those that were numbered by NVML are then the ones CUDA means."""
    if missing := cuda_missing():
        raise BadRequest(f"executor cuda: {missing}", param="executor")
    count_by_bus()


def on_dies(executor: str, dies: Sequence[int]) -> AbstractContextManager[None]:
    """Around work of an executor: what a device refuses becomes a fault that names the die."""
    return faults.named(dies) if executor == "cuda" else nullcontext()


def _new_draw(executor: str) -> NewDraw | None:
    """How samplers draw from the rows of an executor, when it has a way of its own."""
    if executor != "cpu":
        return None
    from pantheon.accel.cpu import drawing

    return drawing.new_draw


def _upload(die: Executor, plan: Plan, file: GGUFFile, n_ctx: int, kv: KVType, progress: Progress | None) -> Runner:
    """Hand the weights over."""
    with _faults_of(file, die.name):
        return die.load(plan, GGUFWeights(file), n_ctx=n_ctx, kv_type=kv, progress=progress)


def check_runs(plan: Plan, file: GGUFFile, kv: KVType, executor: str = "cpu") -> None:
    """Raise what a load on an executor would raise for types and shapes; nothing is loaded."""
    die: Any = pick_executor(executor, None)
    with _faults_of(file, executor):
        die.check(plan, GGUFWeights(file), kv_type=kv)


@contextmanager
def _faults_of(file: GGUFFile, executor: str) -> Iterator[None]:
    """A fault names the file, not only the tensor."""
    try:
        yield
    except PantheonError as fault:
        if fault.status in (503, 507) or (isinstance(fault, ModelFileError) and fault.path in map(str, file.shards)):
            raise
        raise ModelFileError(file.path, fault.message, code=fault.code, param=fault.param) from None
    except ValueError as fault:
        # a plan that is sound, but of shapes that this executor has no kernels for
        raise ModelFileError(file.path, f"the {executor} executor can not run it: {fault}") from fault


def load_tokenizer_file(path: str | Path) -> Tokenizer:
    """The tokenizer of a file that may hold no weights."""
    with open_gguf(path) as file:
        return _naming(file, load_tokenizer)


def pick_executor(
    name: str, threads: int | None, dies: Sequence[int] = (0,), cuts: Sequence[int] = ()
) -> Executor:  # fmt: skip
    """The executor of a name; raises BadRequest for another one, for one that is not installed and for a count of
    threads that is none."""
    if threads is not None and not (isinstance(threads, int) and 1 <= threads <= MAX_THREADS):
        raise BadRequest(
            f"threads must be a whole number from 1 to {MAX_THREADS}, not {threads!r:.40}", param="threads"
        )
    if name == "cpu":
        from pantheon.accel.cpu.executor import CpuExecutor

        return CpuExecutor(threads)
    if name == "cuda":
        from pantheon.accel.cuda.executor import CudaExecutor

        return CudaExecutor(dies, cuts)
    if name == "reference":
        from pantheon.accel.reference import ReferenceExecutor

        return ReferenceExecutor()
    raise BadRequest(f"unknown executor {name!r}; known: cpu, cuda, reference", param="executor")


def plan_of(file: GGUFFile) -> Plan:
    """The plan of an open file; a fault names the file."""
    shapes = {name: info.shape for name, info in file.tensors.items()}
    try:
        return make_plan(file.metadata, shapes)
    except PantheonError as fault:
        raise ModelFileError(file.path, fault.message, code=fault.code, param=fault.param) from None


def tokenizer_of(file: GGUFFile, plan: Plan) -> Tokenizer:
    """The tokenizer, checked against the embedding table."""
    tokenizer = _naming(file, load_tokenizer)
    if tokenizer.n_vocab > plan.n_vocab:
        raise ModelFileError(
            file.path,
            f"tokenizer.ggml.tokens has {tokenizer.n_vocab} tokens, but token_embd.weight only {plan.n_vocab} rows",
            param="tokenizer.ggml.tokens",
        )
    return tokenizer


def _naming(file: GGUFFile, read: Any) -> Any:
    """Run a reader of metadata so that its fault names the file."""
    try:
        return read(file.metadata)
    except ModelFileError:
        raise
    except PantheonError as fault:
        raise ModelFileError(file.path, fault.message, code=fault.code, param=fault.param) from None


def template_of(
    file: GGUFFile, tokenizer: Tokenizer, instead: str | None = None
) -> ChatTemplate | BrokenTemplate:  # fmt: skip
    """The file's chat template, or the one to use instead, ChatML when there is none; one that does not compile is
    reported and kept broken."""
    source = instead or file.metadata.get("tokenizer.chat_template") or CHATML
    if not isinstance(source, str):
        raise ModelFileError(file.path, "tokenizer.chat_template is not a string", param="tokenizer.chat_template")
    texts = [tokenizer.token_text(i) if i is not None else "" for i in (tokenizer.bos_id, tokenizer.eos_id)]
    try:
        return ChatTemplate(source, bos_token=texts[0], eos_token=texts[1])
    except PantheonError as fault:
        log.warning("chat template does not compile %s", fields(file=file.path, fault=fault.message))
        return BrokenTemplate(source, fault)


def model_name(file: GGUFFile) -> str:
    """The file's stem, without the shard suffix."""
    return file.path.stem.split("-00001-of-")[0]


def pick_ctx(ctx: int | None, plan: Plan) -> int:
    """The context to run with; more than the model was trained for is allowed only when asked for."""
    if ctx is None:
        return min(plan.n_ctx_train, DEFAULT_CTX)
    if not isinstance(ctx, int) or not 2 <= ctx <= MAX_CTX:
        raise BadRequest(f"ctx must be from 2 to {MAX_CTX} tokens, not {ctx!r:.40}", param="ctx")
    return ctx


def packed_bytes(die: Any, file: GGUFFile, plan: Plan, n_ctx: int, kv: KVType) -> int:
    """Bytes of the weights as an executor keeps them and of its scratch; 0 where it can not say before it loads."""
    types = {name: info.type.name for name, info in file.tensors.items()}
    try:
        parts = die.predict(plan, types, n_ctx=n_ctx, kv_type=kv)
    except (AttributeError, KeyError):
        return 0
    return int(parts["weights"] + parts["scratch"])


def check_memory(plan: Plan, n_ctx: int, kv: KVType, *, weights: int = 0, installed: int | None = None) -> None:
    """Refuse what the machine could never hold: mappings are lazy, so it would only die later, in use.

    weights: bytes that are there for any context.  installed: bytes of memory (default: this machine's).  Raises
    PantheonError 507 naming ctx and the numbers.
    """
    if installed is None:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = plan.state.slot_bytes(kv, n_ctx) + sum(8 * (rope.n_rot // 2) * n_ctx for rope in plan.ropes)
    if needed + weights > installed:
        gib = [f"{size / (1 << 30):.1f} GiB" for size in (needed, installed, weights)]
        hint = "no context fits" if weights > installed else "ask for a shorter one"
        beside = f" beside {gib[2]} for the model" if weights else ""
        raise PantheonError(
            f"a context of {n_ctx} tokens needs {gib[0]}{beside}, but the machine has {gib[1]}: {hint}",
            status=507, type="invalid_request_error", code="out_of_memory", param="ctx",
        )  # fmt: skip


def pick_kv_type(kv_type: str | None, executor: str, file: GGUFFile, plan: Plan) -> KVType:
    """The cache is as precise as the weights: float16 for quantised files, float32 otherwise and in the oracle."""
    if kv_type is not None:
        if kv_type not in [k.value for k in KVType]:
            known = ", ".join(k.value for k in KVType)
            raise BadRequest(f"unknown kv_type {kv_type!r}; known: {known}", param="kv_type")
        return KVType(kv_type)
    if settings.get("QWEN35_KV_Q4") and executor != "reference":
        return KVType.Q4_0
    types = {file.tensors[m.tensor].type.name for m in plan.matrices()}
    return KVType.F32 if executor == "reference" or types <= _PRECISE else KVType.F16
