"""The official client, unchanged, over a real socket, against a real engine."""

import pytest

from tests.invariants import check_cache

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from pensieve.serve.server import create_server  # noqa: E402
from pensieve.serve.server.replies import Reply  # noqa: E402
from tests.server.live import REAL, Hold, held, serving  # noqa: E402
from tests.waiting import PATIENCE_S, until  # noqa: E402


@pytest.fixture(scope="module")
def live():
    with create_server(**REAL) as server, serving(server) as (state, url):
        yield state, openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def client(live):
    return live[1]


GREEDY = {"model": "tiny", "temperature": 0}


def chat(client, messages, **fields):
    return client.chat.completions.create(messages=messages, **{"max_tokens": 8, **GREEDY, **fields})


def details(reply):
    found = reply.usage.prompt_tokens_details.model_extra
    cached = reply.usage.prompt_tokens_details.cached_tokens
    kinds = ("gpu", "cpu", "disk", "recomputed", "new")
    assert sum(found[kind] for kind in kinds) == reply.usage.prompt_tokens
    assert cached == found["gpu"] + found["cpu"] + found["disk"]
    return found


def test_a_chat_goes_on_where_it_ended_without_any_name(client):
    messages = [{"role": "user", "content": "Tell me of the sea, and of all that lives in it."}]
    first = chat(client, messages)
    assert details(first)["new"] == first.usage.prompt_tokens
    text = first.choices[0].message.content
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And of hills?"}]
    second = chat(client, messages)
    assert second.session_id == first.session_id
    assert details(second)["gpu"] == first.usage.prompt_tokens + first.usage.completion_tokens - 1
    again = chat(client, messages)  # regenerated: a fork, which keeps its prefix
    assert again.session_id != first.session_id and details(again)["gpu"] >= 64
    assert again.choices[0].message.content == second.choices[0].message.content
    assert first.choices[0].finish_reason in ("length", "stop")


def test_a_stream_is_the_reply_and_its_usage(client):
    messages = [{"role": "user", "content": "Count with me."}]
    whole = chat(client, messages, max_tokens=20, extra_body={"session_id": "whole"})
    chunks = list(chat(client, messages, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_and_their_stop_strings_and_seeds(client):
    def complete(**fields):
        return client.completions.create(prompt="Once upon a time", **{"model": "tiny", "max_tokens": 12, **fields})

    a, b, c = (complete(temperature=1.0, seed=seed).choices[0].text for seed in (7, 7, 8))
    assert a == b != c
    stop = next(character for character in a[1:] if character.isprintable() and character != "\ufffd")
    cut = complete(temperature=1.0, seed=7, stop=stop)
    assert cut.choices[0].text == a[: a.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    streamed = "".join(part.choices[0].text for part in complete(temperature=1.0, seed=7, stream=True))
    assert streamed == a


def test_a_named_session_takes_new_messages_or_the_whole_history(client):
    body = {"extra_body": {"session_id": "named ☃"}}
    first = chat(client, [{"role": "user", "content": "One"}], **body)
    second = chat(client, [{"role": "user", "content": "Two"}], **body)
    said = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Two"},
    ]
    assert second.usage.prompt_tokens > first.usage.total_tokens
    regenerated = chat(client, said, **body)
    assert regenerated.usage.prompt_tokens == second.usage.prompt_tokens
    assert regenerated.choices[0].message.content == second.choices[0].message.content
    assert details(regenerated)["gpu"] == second.usage.prompt_tokens - 1, (
        "asked again: nothing but the last token is computed"
    )
    by_header = chat(client, [{"role": "user", "content": "Three"}], extra_headers={"X-Session-Id": "plain"})
    assert by_header.session_id == "plain"


def test_responses_go_on_fork_and_are_deleted(live):
    state, client = live
    fields = {"model": "tiny", "temperature": 0, "max_output_tokens": 8}
    first = client.responses.create(input="Hello there", instructions="Be brief.", **fields)
    assert first.status in ("completed", "incomplete")
    assert first.output_text == first.output[0].content[0].text
    second = client.responses.create(input="Go on", instructions="Be brief.", previous_response_id=first.id, **fields)
    found = second.usage.input_tokens_details.model_extra
    assert found["gpu"] == first.usage.input_tokens + first.usage.output_tokens - 1
    fork = client.responses.create(
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Or else"}]}],
        instructions="Be brief.",
        previous_response_id=first.id,
        **fields,
    )
    assert fork.session_id != second.session_id == first.session_id
    third = client.responses.create(
        input="And then", instructions="Be brief.", previous_response_id=second.id, **fields
    )
    assert third.session_id == second.session_id, "a fork has changed nothing"
    assert third.usage.input_tokens > second.usage.total_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    before = len(state.server.conversations)
    unstored = client.responses.create(input="Forget this", store=False, **fields)
    assert len(state.server.conversations) == before
    for gone in (first, unstored):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="x", previous_response_id=first.id, **fields)


def test_a_streamed_response_tells_what_it_is_and_ends_as_the_whole(client):
    fields = {"model": "tiny", "temperature": 0, "max_output_tokens": 12, "input": "Stream, please"}
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
    whole = client.responses.create(tools=[tool], **fields)
    assert whole.model_dump()["tools"][0].items() >= {**tool, "description": None, "strict": None}.items()
    whole = client.responses.create(**fields)
    events = list(client.responses.create(stream=True, **fields))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", whole.status]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == events[-1].response.output_text == whole.output_text


def test_a_client_that_goes_away_frees_what_it_held(live, monkeypatch):
    state, client = live
    ended = []
    state.server.observe(lambda _, record: ended.append(record.status))
    hold, on_event = Hold(events=60), Reply.on_event

    def told(feed, event):
        on_event(feed, event)
        hold(event)

    monkeypatch.setattr(Reply, "on_event", told)
    stream = chat(client, [{"role": "user", "content": "Long"}], max_tokens=900, stream=True)
    next(iter(stream))
    assert hold.reached.wait(PATIENCE_S)
    stream.close()
    assert until(lambda: all(turn.cut for turn in _asked(state.server))), "it was noticed"
    hold.release()
    assert until(lambda: state.server.under_way == 0)
    assert ended == ["cancelled"]
    with held(state.server):  # so that there is no reply within any time
        with pytest.raises(openai.APITimeoutError):
            chat(client.with_options(timeout=0.3), [{"role": "user", "content": "Long too"}], max_tokens=900)
        assert until(lambda: all(turn.cut for turn in _asked(state.server)))
    assert until(lambda: state.server.under_way == 0)
    check_cache(state.server.system.engine.cache)


def _asked(server):
    """Turns under way, but for the one that holds up the engine."""
    return [turn for one in server.conversations if one.id != "~held" for turn in one.turns]


def test_what_is_not_supported_is_refused_by_name(client):
    messages = [{"role": "user", "content": "x"}]
    for field, value in {"logprobs": True, "n": 2, "presence_penalty": 0.5, "logit_bias": {"5": 3}}.items():
        with pytest.raises(openai.BadRequestError, match=field):
            chat(client, messages, **{field: value})
    with pytest.raises(openai.BadRequestError, match="context"):
        chat(client, messages, max_tokens=10**6, stream=True)
    with pytest.raises(openai.NotFoundError, match="tiny"):
        chat(client, messages, model="gpt-none")
    assert [model.id for model in client.models.list()] == ["tiny"]
