"""The page that `advise` shows: in a terminal, and as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console

from pensieve.lab.commands.advise.advice import COMMON_EDGE, Advice, Outcome, pauses
from pensieve.lab.commands.advise.causes import CAUSES
from pensieve.lab.statistics import Estimate
from pensieve.lab.tables import Table, grid
from pensieve.units import GIB, NONE, duration, format_bytes, percent, significant, three_digits

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Bar:
    """A line of a chart. share: of its whole, 0 to 1; low, high: of its interval."""

    name: str
    share: float
    value: str
    note: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """What both forms show. commands: the option, and its lines for vLLM."""

    title: str
    answer: str
    facts: Sequence[tuple[str, str]]
    notes: Sequence[str]
    checked: str
    causes: Sequence[Bar]
    causes_title: str
    hows: Sequence[tuple[str, str]]
    helps: Sequence[Bar]
    others: Sequence[Bar]
    options: Table
    commands: Sequence[tuple[str, str]]


def page_of(advice: Advice) -> Page:
    helps = [one for one in advice.outcomes if one.helps]
    others = [one for one in advice.outcomes if not one.helps]
    split = advice.split
    return Page(
        title=f"{advice.source.path.name} on {advice.plan.model.name}, {advice.plan.device.label}",
        answer=_answer(advice, helps),
        facts=_facts(advice),
        notes=_notes(advice),
        checked=_checked(advice),
        causes=_causes(advice),
        causes_title=f"{split.missed_tokens:,} prompt tokens not found, {significant(split.missed_s)} s of prefill "
        f"({advice.split_of})",
        hows=[(name, how) for name, how in CAUSES.values()],
        helps=[_gain_bar(one) for one in helps],
        others=[_gain_bar(one) for one in others],
        options=[_line("as it was", advice, None), *(_line(one.option.name, advice, one) for one in [*helps, *others])],
        commands=[(one.option.name, line) for one in helps[:3] for line in one.option.lines],
    )


def _answer(advice: Advice, helps: Sequence[Outcome]) -> str:
    split = advice.split
    known = [line for line in split.lines if line.tokens]
    most = max(known, key=lambda line: line.tokens or 0, default=None)
    why = "" if most is None else (
        f" Most of what was missed: {CAUSES[most.cause][0]}, {percent((most.tokens or 0) / max(1, split.missed_tokens))} %."
    )  # fmt: skip
    best = (
        f" Best: {helps[0].option.name}, {_points(helps[0].more)} points more."
        if helps
        else " Nothing tried would help."
    )
    return f"{percent(1 - split.missed_tokens / max(1, split.prompt_tokens))} % of the prompt tokens were found.{why}{best}"


def _facts(advice: Advice) -> list[tuple[str, str]]:
    reading, split, plan = advice.reading, advice.split, advice.plan
    sent = reading.sent
    returns = sum(one.pause_s is not None for one in sent)
    span = max(one.at_s for one in sent) - min(one.at_s for one in sent)
    pause = pauses(reading)
    told = "" if advice.served.told else " (assumed)"
    size = advice.served
    known = [one for one in sent if one.found is not None]
    hits = UNKNOWN
    if known:
        hits = f"{percent(sum(one.found or 0 for one in known) / sum(one.prompt for one in known))} % of prompt tokens"
        hits += "" if len(known) == len(sent) else f", of {len(known):,} requests"
    return [
        ("requests", f"{len(sent):,} in {duration(span)}, {three_digits(len(sent) / span if span else None)} a second"),
        ("conversations", f"{reading.sessions:,}{'' if reading.named else ', by their prefixes'}"
                          f"{f', {reading.tenants} tenants' if reading.tenants > 1 else ''}"),
        ("returns", f"{returns:,} requests" + ("" if pause is None else f", {duration(pause)} after the reply (median)")),
        ("shared prefix", f"{reading.shared_tokens:,} tokens, in more than half of the conversations"),
        ("working set", f"{reading.unique_tokens:,} different tokens, "
                        f"{format_bytes(reading.unique_tokens * plan.model.kv_bytes_per_token)} of KV"),
        (f"cache{told}", f"{size.gpu_tokens:,} tokens on the GPU, {size.cpu_tokens:,} in CPU memory, "
                         f"blocks of {size.block_tokens}"),
        ("found by the engine", hits),
        ("could be found", f"{percent(split.unlimited_tokens / split.prompt_tokens)} % without limit, "
                           f"{percent(split.bound_tokens / split.prompt_tokens)} % with this much memory (offline bound)"),
    ]  # fmt: skip


def _notes(advice: Advice) -> list[str]:
    reading = advice.reading
    found = []
    if not advice.served.told:
        found.append(
            "Nobody says what served these requests: sizes and policy are assumed. Say engine=vllm blocks=N cpu_bytes=N."
        )
    returning = {one.session for one in reading.sent if one.pause_s is not None}
    for edge, sessions in reading.edges.most_common(1):
        if sessions >= COMMON_EDGE * len(returning):
            found.append(
                f"{sessions:,} of {len(returning):,} returning conversations first differ from what they had sent at token "
                f"{edge:,}: something changes there in the template, such as a timestamp."
            )
        elif reading.edited:
            found.append(
                f"{len(reading.edited):,} conversations edited what they had sent, at most {sessions:,} at one position."
            )
    if reading.shortened:
        found.append(
            f"{reading.shortened:,} requests came back without a part of the reply before, as without thinking blocks."
        )
    lacking = {what: number for what, number in sorted(reading.unknown.items()) if number}
    whole = [what for what, number in lacking.items() if number >= len(reading.sent)]
    if whole:
        found.append(f"No request has {', '.join(whole)}.")
    found += [f"{number:,} requests lack {what}." for what, number in lacking.items() if what not in whole]
    if advice.settings.machine == "recorded":
        found.append("Times are of the machine that the recording's times to first token tell.")
    if advice.source.strays:
        found.append(f"{advice.source.strays:,} requests whose times lie far from all others are left out.")
    if advice.source.in_file > len(reading.sent):
        found.append(f"{len(reading.sent):,} of {advice.source.in_file:,} requests of the file were read.")
    if reading.tenants > 1:
        found.append("Tenants are taken to find nothing of each other.")
    if reading.facts.lost:
        found.append(
            "Not recorded: " + ", ".join(f"{number:,} {why}" for why, number in reading.facts.lost.items()) + "."
        )
    if not reading.facts.complete:
        found.append("The recording was cut off.")
    if advice.share < 1.0:
        found.append(
            f"Replays are of {advice.requests:,} requests of {advice.conversations:,} conversations drawn at random, with "
            f"{percent(advice.share)} % of each tier, their share of all different tokens. Their times to first token are "
            "without the queueing of the others."
        )
    if advice.base.left_out or advice.base.failed:
        found.append(
            f"{advice.base.left_out:,} requests need more than the model's context and are not replayed; "
            f"{advice.base.failed:,} did not complete."
        )
    return found


def _checked(advice: Advice) -> str:
    """How far the replay of what served is from what the engine said."""
    if advice.engine_found is None:
        return "The engine's own hits are not in the recording: nothing was checked."
    if not advice.served.told:
        return f"The engine found {percent(advice.engine_found)} %; its sizes are not known, so its replay was not checked."
    apart = 100 * (advice.base.rate - advice.engine_found)
    return (
        f"Checked: the engine found {percent(advice.engine_found)} % of these prompts, its replay "
        f"{percent(advice.base.rate)} % ({apart:+.1f} points; largest difference of a request "
        f"{advice.largest_difference:,} tokens)."
    )


def _causes(advice: Advice) -> list[Bar]:
    whole = max(1, advice.split.missed_tokens)
    bars = []
    for line in advice.split.lines:
        name = CAUSES[line.cause][0]
        if line.tokens is None or line.seconds is None:
            bars.append(Bar(name, 0.0, UNKNOWN, "within the other causes"))
        else:
            share = line.tokens / whole
            bars.append(
                Bar(name, share, f"{percent(share)} %", f"{line.tokens:,} tokens, {significant(line.seconds)} s")
            )
    return bars


def _gain_bar(one: Outcome) -> Bar:
    ends = (one.more.ci_low, one.more.ci_high)
    return Bar(one.option.name, one.more.value, _points(one.more), one.option.why, *ends)


def _points(more: Estimate) -> str:
    if more.ci_low is None or more.ci_high is None:
        return f"{100 * more.value:+.1f}"
    return f"{100 * more.value:+.1f} [{100 * more.ci_low:+.1f}, {100 * more.ci_high:+.1f}]"


def _line(name: str, advice: Advice, one: Outcome | None) -> dict[str, str]:
    """One replay: what it found, its times, and the price of what it adds."""
    found = advice.base if one is None else one.replayed
    faster = NONE
    if one is not None:
        ends = "" if one.faster.ci_low is None else f" [{one.faster.ci_low:.2f}, {one.faster.ci_high:.2f}]"
        faster = f"{one.faster.value:.2f}×{ends}"
    return {
        "": name,
        "found, %": percent(found.rate),
        "more, points": NONE if one is None else _points(one.more),
        "TTFT p50, ms": three_digits(found.ttft(0.5)),
        "p90": three_digits(found.ttft(0.9)),
        "mean TTFT lower": faster,
        "price": NONE if one is None else _price(one, advice),
    }


def _price(one: Outcome, advice: Advice) -> str:
    added = one.option.added
    if not added:
        return "no memory"
    prices = {"cpu": advice.settings.prices.cpu_gib_hour, "disk": advice.settings.prices.disk_gib_hour}
    costs = [(prices[tier], count / GIB) for tier, count in added.items()]
    told = (
        ""
        if any(price is None for price, _ in costs)
        else f", {sum((price or 0) * gib for price, gib in costs):.3g} an hour"
    )
    return " + ".join(f"{format_bytes(count)} {tier}" for tier, count in added.items()) + told


def show(page: Page, console: Console) -> None:
    console.print(f"\n[bold]{page.title}[/bold]\n{page.answer}\n", highlight=False)
    console.print(grid([{"what": name, "you have": text} for name, text in page.facts], left=("you have",), fold=True))
    lines = [{page.causes_title: one.name, "share": one.value, "": one.note} for one in page.causes]
    console.print(grid(lines, "Where the misses come from", fold=True))
    console.print(grid(page.options, "What would help, the most first; below, what would not", fold=True))
    for name, line in page.commands:
        console.print(f"{name}:\n  {line}", markup=False, highlight=False, soft_wrap=True)
    for note in (page.checked, *page.notes):
        console.print(f"- {note}", markup=False, highlight=False)


def render(page: Page) -> str:
    """The whole file as text; every value is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).resolve().parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    most = max(
        [
            0.01,
            *(abs(end) for one in [*page.helps, *page.others] for end in (one.share, one.high or 0.0, one.low or 0.0)),
        ]
    )
    return environment.get_template("page.html.j2").render(page=page, most=most)
