"""The page that `advise` shows: in a terminal, and as one HTML file that needs nothing else."""

from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from omegaconf import DictConfig
from rich.console import Console

from pensieve.lab.commands.advise.advice import COMMON_EDGE, Advice, Outcome, advise
from pensieve.lab.commands.advise.causes import CAUSES, Split
from pensieve.lab.results.size_map import Prices
from pensieve.lab.statistics import Estimate
from pensieve.lab.trial.terminal import console, say
from pensieve.units import GIB, NONE, Table, duration, format_bytes, grid, percent, significant, three_digits

UNKNOWN = "unknown"


def advise_page(cfg: DictConfig) -> int:
    """What `pensieve advise` does: the page of its advice in the terminal and in a file."""
    advice = advise(cfg, say)
    page = page_of(advice)
    show(page, console())
    to = Path(advice.settings.to or advice.source.path.with_suffix(".advice.html")).expanduser()
    to.write_text(render(page), encoding="utf-8")
    print(f"Page:     {to}")
    return 0


def page_of(advice: Advice) -> dict[str, Any]:
    """What both forms show. outcomes: those that help first. commands: lines for vLLM, by the option that they are of."""
    split, outcomes = advice.split, sorted(advice.outcomes, key=lambda one: not one.helps)
    helps = [one for one in outcomes if one.helps]
    return {
        "title": f"{advice.source.path.name} on {advice.plan.model.name}, {advice.plan.device.label}",
        "answer": _answer(advice, helps),
        "facts": _facts(advice),
        "notes": [_checked(advice), *_notes(advice)],
        "causes_title": f"{split.missed_tokens:,} prompt tokens not found, {significant(split.missed_s)} s of prefill "
        f"({advice.split_of})",
        "causes": _causes(split),
        "outcomes": outcomes,
        "replays": [_line(advice, None), *(_line(advice, one) for one in outcomes)],
        "commands": {one.option.name: one.option.command for one in helps[:3] if one.option.command},
    }


def show(page: dict[str, Any], console: Console) -> None:
    console.print(f"\n[bold]{page['title']}[/bold]\n{page['answer']}\n", highlight=False)
    facts = [{"what": name, "you have": text} for name, text in page["facts"].items()]
    console.print(grid(facts, left=("you have",), fold=True))
    console.print(grid(page["causes"], f"Where the misses come from: {page['causes_title']}", fold=True))
    console.print(grid(page["replays"], "What would help, the most first; below, what would not", fold=True))
    commands = [f"{name}:\n  {line}" for name, line in page["commands"].items()]
    for line in [*commands, *(f"- {note}" for note in page["notes"])]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def render(page: dict[str, Any]) -> str:
    """The whole file as text; every value is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).resolve().parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    ends = [abs(end or 0.0) for one in page["outcomes"] for end in (one.more.value, one.more.ci_low, one.more.ci_high)]
    return environment.get_template("page.html.j2").render(page=page, most=max([0.01, *ends]), points=_points)


def _answer(advice: Advice, helps: list[Outcome]) -> str:
    split = advice.split
    said = [f"{percent(1 - split.missed_tokens / max(1, split.prompt_tokens))} % of the prompt tokens were found."]
    tokens, most = max((known.tokens, cause) for cause, known in split.causes.items() if known is not None)
    if tokens:
        said.append(f"Most of what was missed: {CAUSES[most]}, {percent(tokens / split.missed_tokens)} %.")
    best = f"Best: {helps[0].option.name}, {_points(helps[0].more)} points more." if helps else ""
    return " ".join([*said, best or "Nothing tried would help."])


def _facts(advice: Advice) -> dict[str, str]:
    reading, split, size, sent = advice.reading, advice.split, advice.served, advice.reading.sent
    pauses = [one.pause_s for one in sent if one.pause_s is not None]
    span = max(one.at_s for one in sent) - min(one.at_s for one in sent)
    known = [one for one in sent if one.found is not None]
    hits = f"{percent(sum(one.found or 0 for one in known) / sum(one.prompt for one in known))} %" if known else UNKNOWN
    of = f" of {len(known):,} requests" if 0 < len(known) < len(sent) else ""
    kv = format_bytes(reading.unique_tokens * advice.plan.model.kv_bytes_per_token)
    return {
        "requests": f"{len(sent):,} in {duration(span)}, {three_digits(len(sent) / span if span else None)} a second",
        "conversations": f"{reading.sessions:,}{'' if reading.named else ', by their prefixes'}"
                         f"{f', {len(reading.tenants)} tenants' if len(reading.tenants) > 1 else ''}",
        "returns": f"{len(pauses):,} requests{f', {duration(median(pauses))} after the reply (median)' if pauses else ''}",
        "working set": f"{reading.unique_tokens:,} different tokens, {kv} of KV",
        "cache" if size.told else "cache (assumed)":
            f"{size.gpu_tokens:,} tokens on the GPU, {size.cpu_tokens:,} in CPU memory, blocks of {size.block_tokens}",
        "found by the engine": hits + of,
        "could be found": f"{percent(split.unlimited_tokens / split.prompt_tokens)} % without limit, "
                          f"{percent(split.bound_tokens / split.prompt_tokens)} % with this much memory (offline bound)",
    }  # fmt: skip


def _checked(advice: Advice) -> str:
    """How far the replay of what served is from what the engine said."""
    if advice.engine_found is None:
        return "The engine's own hits are not in the recording: nothing was checked."
    found, apart = percent(advice.engine_found), 100 * (advice.base.rate - advice.engine_found)
    if not advice.served.told:
        return f"The engine found {found} %; its sizes are not known, so its replay was not checked."
    return (
        f"Checked: the engine found {found} % of these prompts, its replay {percent(advice.base.rate)} % "
        f"({apart:+.1f} points; largest difference of a request {advice.largest_difference:,} tokens)."
    )


def _notes(advice: Advice) -> list[str]:
    """What limits the page."""
    reading, base, requests = advice.reading, advice.base, len(advice.reading.sent)
    edge, sessions = next(iter(reading.edges.most_common(1)), (0, 0))
    lost = ", ".join(f"{number:,} {why}" for why, number in reading.facts.lost.items())
    notes: list[tuple[object, str]] = [
        (not advice.served.told, "Nobody says what served these requests: sizes and policy are assumed. Say engine=vllm "
                                 "blocks=N cpu_bytes=N."),
        (sessions >= COMMON_EDGE * max(1, reading.returning),
         f"{sessions:,} of {reading.returning:,} returning conversations first differ from what they had sent at token "
         f"{edge:,}: something changes there in the template, such as a timestamp."),
        (reading.shortened, f"{reading.shortened:,} requests came back without a part of the reply before, as without "
                            "thinking blocks."),
        *((number, f"{number:,} of {requests:,} requests lack {what}.") for what, number in sorted(reading.unknown.items())),
        (advice.settings.machine == "recorded", "Times are of the machine that the recording's times to first token tell."),
        (advice.source.strays, f"{advice.source.strays:,} requests whose times lie far from all others are left out."),
        (advice.source.in_file > requests, f"{requests:,} of {advice.source.in_file:,} requests of the file were read."),
        (lost, f"Not recorded: {lost}."),
        (not reading.facts.complete, "The recording was cut off."),
        (advice.share < 1.0, f"Replays are of {len(advice.part.sent):,} requests of {advice.part.sessions:,} conversations "
                             f"drawn at random, with {percent(advice.share)} % of each tier, their share of all different "
                             "tokens. Their times to first token are without the queueing of the others."),
        (base.left_out or base.failed, f"{base.left_out:,} requests need more than the model's context and are not replayed; "
                                       f"{base.failed:,} did not complete."),
    ]  # fmt: skip
    return [note for holds, note in notes if holds]


def _causes(split: Split) -> Table:
    lines = []
    for cause, known in split.causes.items():
        share, what = UNKNOWN, "within the other causes"
        if known is not None:
            share = f"{percent(known.tokens / max(1, split.missed_tokens))} %"
            what = f"{known.tokens:,} tokens, {significant(known.seconds)} s"
        lines.append({"cause": CAUSES[cause], "share": share, "missed": what})
    return lines


def _points(more: Estimate) -> str:
    ends = "" if more.ci_low is None else f" [{100 * more.ci_low:+.1f}, {100 * (more.ci_high or 0.0):+.1f}]"
    return f"{100 * more.value:+.1f}{ends}"


def _line(advice: Advice, one: Outcome | None) -> dict[str, str]:
    """One replay: what it found, its times, and the price of what it adds."""
    found = advice.base if one is None else one.replayed
    more = faster = price = NONE
    if one is not None:
        ends = "" if one.faster.ci_low is None else f" [{one.faster.ci_low:.2f}, {one.faster.ci_high:.2f}]"
        more, faster = _points(one.more), f"{one.faster.value:.2f}×{ends}"
        price = _price(one, advice.settings.prices)
    return {
        "": "as it was" if one is None else one.option.name,
        "found, %": percent(found.rate),
        "more, points": more,
        "TTFT p50, ms": three_digits(found.ttft(0.5)),
        "p90": three_digits(found.ttft(0.9)),
        "mean TTFT lower": faster,
        "price": price,
    }


def _price(one: Outcome, prices: Prices) -> str:
    """The memory that a change takes, and what an hour of it costs where each tier has a price."""
    added = one.option.added
    memory = " + ".join(f"{format_bytes(count)} {tier}" for tier, count in added.items()) or "no memory"
    hourly = {"cpu": prices.cpu_gib_hour, "disk": prices.disk_gib_hour}
    costs = [price * added[tier] / GIB for tier, price in hourly.items() if tier in added and price is not None]
    return f"{memory}, {sum(costs):.3g} an hour" if costs and len(costs) == len(added) else memory
