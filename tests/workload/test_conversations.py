from pensieve.lab.workload.prose import shipped


def test_at_least_ten_conversations_of_ten_turns():
    assert len(shipped()) >= 10
    assert all(len(conversation.turns) >= 10 for conversation in shipped())


def test_ids_are_unique_and_usable_as_session_names():
    ids = [conversation.id for conversation in shipped()]
    assert len(set(ids)) == len(ids)
    assert all(name.isascii() and name.replace("-", "").isalnum() for name in ids)


def test_messages_are_distinct_english_of_a_sensible_length():
    messages = [turn.user for conversation in shipped() for turn in conversation.turns]
    assert len(set(messages)) == len(messages)
    assert all(60 <= len(message) <= 200 for message in messages)
    assert all(message == message.strip() and message[-1] in ".?!" for message in messages)


def test_reply_lengths_vary():
    words = [turn.reply_words for conversation in shipped() for turn in conversation.turns]
    assert min(words) >= 20
    assert max(words) <= 120
    assert len(set(words)) >= 8
