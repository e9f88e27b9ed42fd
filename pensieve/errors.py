"""Every error a user can meet, on one page.

Each message is a sentence that says what is wrong and what to do. `assert` is for our own bugs.
"""

from pathlib import Path

_RUNNERS = Path(__file__).resolve().parents[1] / "runners"


def in_checkout() -> bool:
    """Whether runners/ and the Makefile lie beside this package. From a wheel its commands are verbs of `pensieve`."""
    return (_RUNNERS / "run.py").is_file()


def typed(verb: str) -> str:
    """A command as its reader types it: `python runners/run.py`, or `pensieve run` from a wheel."""
    return f"python runners/{verb}.py" if in_checkout() else f"pensieve {verb}"


class PensieveError(Exception):
    """Root of all errors that are the user's to fix."""


class ConfigError(PensieveError):
    """A configuration field is unknown, malformed or contradicts another."""


class MalformedInput(PensieveError):
    """A workload's file, or a line of it, cannot be read."""


class EngineMissing(PensieveError):
    """The chosen baseline, workload or option needs an engine that is not there (yet, or not installed)."""


class EngineFailed(PensieveError):
    """An outside engine did not start, or ended while it was needed; the message holds the last lines of its log."""


class HardwareMissing(PensieveError):
    """The machine lacks the device or the memory that the configuration asks for."""


class WeightsMissing(PensieveError):
    """The model's weights cannot be had: no network, no access, or no such file."""


class UnsupportedModel(PensieveError):
    """The architecture cannot run through the paged attention plug, or fails its load-time self-check."""


class PolicyError(PensieveError):
    """An eviction policy gives a chunk a key that has no place in an order, such as NaN."""


class RequestRefused(PensieveError):
    """A request can never be served; it was refused when it was submitted.

    reason: what the turn's finish_reason says.
    """

    reason = "refused"


class CapacityError(RequestRefused):
    """The request needs more KV blocks than the GPU tier has."""

    reason = "capacity"


class ContextLengthError(RequestRefused):
    """Prompt and output together exceed the model's context length."""

    reason = "context"


def refused(reason: str | None, sentence: str) -> RequestRefused:
    """The error of a turn that came back as refused; reason: its finish_reason."""
    kinds: tuple[type[RequestRefused], ...] = (CapacityError, ContextLengthError)
    return next((kind for kind in kinds if kind.reason == reason), RequestRefused)(sentence)


class RequestFailed(PensieveError):
    """A request was admitted and then failed, was cancelled or timed out.

    reason: what the turn's finish_reason says, where there is more to say than that.
    """

    reason: str | None = None


class MemoryRanOut(RequestFailed):
    """The process that served a request needed more memory than there is, and is gone or was not begun."""

    reason = "memory"


class TooManySessions(PensieveError):
    """A server's client has as many conversations, or tokens in them, as it may."""


class MeasurementInvalid(PensieveError):
    """A trial ran, and not under the conditions that its workload declares: its numbers would mislead."""


class WorkerError(PensieveError):
    """A step failed on the device; only the requests of that step fail with it."""


class TrialTimeout(PensieveError):
    """A trial ran past trial.timeout_s and was ended."""


class ResultsError(PensieveError):
    """The results database cannot be opened, read or written."""


class TrialRunning(ResultsError):
    """Another process runs this very trial."""


class MissingSeries(ResultsError):
    """A figure or table needs trials that the database does not hold."""


class MixedPanel(ResultsError):
    """Trials that mean different things would stand in one panel as if they could be compared."""
