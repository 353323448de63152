"""What loads would take, without loading: `serve --dry-run` and GET /admin/plan [X09, X31].

Both ask the code that admits real loads (engine/admit.py) with a file's header in hand, so they can not differ from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pantheon.engine.admit import LoadPlan, decide_load, load_refusal, plan_load, size_text
from pantheon.errors import PantheonError
from pantheon.mem.mem_state import MemState
from pantheon.mem.memwatch import from_settings
from pantheon.serve import admin
from pantheon.serve.context import App
from pantheon.serve.flags import Row, table
from pantheon.serve.http_request import Request
from pantheon.serve.loading import LoadOptions, ModelSpec
from pantheon.serve.registry import Registry
from pantheon.serve.request_fields import Fields
from pantheon.serve.routes import Responder


def memory_now(options: LoadOptions) -> MemState:
    """What the watcher sees; one look of our own when none runs, which is as good for one decision."""
    if options.watch is not None and options.watch.alive:
        return options.watch.state
    return replace(from_settings().poll_once(), alive=True)


def plan_spec(registry: Registry, spec: ModelSpec, options: LoadOptions, state: MemState) -> LoadPlan:
    """Where a model would go now and whether it fits; binds and loads nothing.

    Raises PantheonError for a file that can not be loaded and for dies that are not there or taken.
    """
    wanted: tuple[int, ...] | None = spec.dies
    if wanted is None and not registry.dies.usable:
        wanted = ()
    threads = registry.dies.threads(wanted or (), options.threads)
    plan = plan_load(
        spec.path, ctx=spec.ctx or options.ctx, kv_type=options.kv_type, threads=threads, state=state,
        executor=options.executor_of(registry.dies, wanted), users=options.users,
    )  # fmt: skip
    if wanted == () or not plan.decision.fits:
        return plan
    registry.dies.refresh()
    infos = {info.index: info for info in registry.dies.snapshot()}
    try:
        places: Sequence[int] = registry.dies.pick(plan.need.need, wanted)
    except PantheonError as fault:
        if fault.status != 507:
            raise
        # the same question again over the dies it may have, for its numbers
        places = [i for i in wanted or infos if infos[i].usable and infos[i].model is None]
        if not places:
            raise
    return decide_load(plan.path, plan.need, state, [infos[i] for i in places])


def get_plan(app: App, request: Request, responder: Responder) -> None:
    """?model=FILE or the name of a loaded one, &ctx=N, &dies=0,1 -> whether it would fit now, and its bytes by part.

    Raises PantheonError as a load does, except that a plan which does not fit is an answer: `fits: false` [X31].
    """
    query = dict(request.query)
    model = query.pop("model", None)
    known = next((entry.path for entry in app.registry.all_entries() if entry.name == model), None)
    body: dict[str, Any] = {"path": model if known is None else known}
    for name, text in query.items():
        body[name] = _number_or_text(name, text)
    try:
        spec = admin.load_fields(app, Fields(body), confine=known is None)
    except PantheonError as fault:
        if fault.param == "path":  # here it is called by the name of the query's key
            fault.param, fault.message = "model", fault.message.replace("path:", "model:", 1)
        raise
    plan = plan_spec(app.registry, spec, app.load_options, memory_now(app.load_options))
    refusal = None if plan.decision.fits else load_refusal(plan)
    message = {} if refusal is None else {"reason": refusal.message, "code": refusal.code}
    responder.send_json(200, {"name": spec.name, **plan.as_dict(), **message})


def _number_or_text(name: str, text: str) -> Any:
    """A query value as the JSON body of a load would have it; what is no number stays text, and is refused as such."""
    if name == "dies":
        return [int(part) if part.isascii() and part.isdigit() else part for part in text.split(",") if part]
    return int(text) if name == "ctx" and text.isascii() and text.isdigit() and len(text) < 20 else text


# ---- serve --dry-run ------------------------------------------------------------------------------------------------


def dry_run(app: App, specs: Sequence[ModelSpec], rows: Sequence[Row]) -> int:
    """Print the configuration and what every model takes, one beside the other; the exit code: 1 when one does not fit
    or can not be read."""
    print("\n".join(table(rows)))
    state, code = memory_now(app.load_options), 0
    for spec in specs:
        print()
        try:
            plan = plan_spec(app.registry, spec, app.load_options, state)
            print("\n".join(_lines(spec, plan)))
            if plan.dies and plan.decision.fits:
                # the next one finds these dies taken
                app.registry.dies.take(spec.name, plan.need.need, plan.dies)
        except PantheonError as fault:
            print(f"{spec.name}  refused\n  {fault.message}")
            code = 1
            continue
        if not plan.decision.fits:
            code = 1
        taken = plan.need.total_bytes if plan.decision.fits and not plan.need.on_die else 0
        state = replace(state, host=replace(state.host, available_bytes=state.host.available_bytes - taken))
    return code


def _lines(spec: ModelSpec, plan: LoadPlan) -> Iterator[str]:
    where = "dies " + ",".join(map(str, plan.dies)) if plan.dies else "cpu"
    yield f"{spec.name}  {'fits' if plan.decision.fits else 'does not fit'}"
    yield f"  file     {plan.path}"
    yield f"  on       {where}"
    yield f"  context  {plan.need.n_ctx} tokens"
    numbers = plan.as_dict()
    parts = {"kv of each user" if part == "kv" else part: count for part, count in numbers["bytes"].items()}
    parts["spike"] = numbers["spike_bytes"]
    bound_by = numbers["bound_by"] or "host"
    yield "  bytes    " + ", ".join(f"{part} {size_text(count)}" for part, count in parts.items() if count)
    yield (
        f"  memory   needs {size_text(numbers['need_bytes'])}, {bound_by} {'have' if ',' in bound_by else 'has'} "
        f"{size_text(numbers['have_bytes'])} above a reserve of {size_text(numbers['reserve_bytes'])}"
    )
    if not plan.decision.fits:
        yield f"  {load_refusal(plan).message}"
