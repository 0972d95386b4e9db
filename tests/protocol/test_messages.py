"""The messages: their tags, their bounds, and that each comes out as it went in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from msgspec import Struct, inspect

from tensorlease.protocol import codec
from tensorlease.protocol import messages as m
from tensorlease.protocol.errors import ProtocolError
from tensorlease.protocol.limits import MAX_VERSION
from tensorlease.protocol.records import Code, Fields, Terms

from .generated import FROM_AGENT, FROM_BROKER, MESSAGES, any_message, frame_with, least, spoiled


def decoded(kind: type[Fields], frame: bytes) -> Fields:
    """Decodes the frame as the side that gets such messages does."""
    if kind in FROM_AGENT:
        return codec.decode_from_agent(frame)
    return codec.decode_from_broker(frame)


def tag(kind: type[Fields]) -> str:
    return str(kind.__struct_config__.tag)


def test_no_two_messages_share_a_tag() -> None:
    tags = [tag(kind) for kind in MESSAGES]
    assert sorted(tags) == sorted(set(tags))


def test_every_message_of_the_module_belongs_to_one_side() -> None:
    bases = {Fields, m.AgentMessage, m.BrokerMessage}
    named = {
        kind
        for kind in vars(m).values()
        if isinstance(kind, type) and issubclass(kind, Fields) and kind.__module__ == m.__name__
    }
    assert named - bases == set(MESSAGES)
    assert not set(FROM_AGENT) & set(FROM_BROKER)


def test_what_agents_say_carries_a_session_and_never_a_sender() -> None:
    for kind in set(FROM_AGENT) - {m.Query}:
        assert issubclass(kind, m.AgentMessage)
        assert kind.__struct_fields__[0] == "session"
        if kind not in (m.TrainerHello, m.WorkerHello):
            assert "instance" not in kind.__struct_fields__


def test_what_the_broker_says_carries_its_epoch_and_the_addressee() -> None:
    for kind in set(FROM_BROKER) - {m.WhoAreYou, m.Reply}:
        assert issubclass(kind, m.BrokerMessage)
        assert kind.__struct_fields__[:2] == ("epoch", "to")


def test_the_messages_with_a_body_are_those_that_carry_tables_handles_or_a_report() -> None:
    assert {m.Batch, m.Offer, m.Deliver, m.Offered, m.Reply} == m.WITH_BODY
    assert set(MESSAGES) >= m.WITH_BODY


@settings(max_examples=200, deadline=None)
@given(any_message())
def test_every_message_comes_out_as_it_went_in(message: Fields) -> None:
    kind = type(message)
    assert kind in MESSAGES
    frame = codec.encode(message)  # type: ignore[arg-type]
    assert decoded(kind, frame) == message


@pytest.mark.parametrize("kind", MESSAGES, ids=tag)
def test_the_least_message_of_each_kind_is_taken(kind: type[Fields]) -> None:
    message = least(kind)
    frame = codec.encode(message)  # type: ignore[arg-type]
    assert decoded(kind, frame) == message


@pytest.mark.parametrize("kind", MESSAGES, ids=tag)
def test_a_message_of_the_other_side_is_refused(kind: type[Fields]) -> None:
    frame = codec.encode(least(kind))  # type: ignore[arg-type]
    other = codec.decode_from_broker if kind in FROM_AGENT else codec.decode_from_agent
    with pytest.raises(ProtocolError):
        other(frame)


def test_every_value_out_of_bounds_is_refused_with_the_name_of_its_field() -> None:
    count = 0
    for kind, field, value in spoiled():
        with pytest.raises(ProtocolError) as caught:
            decoded(kind, frame_with(kind, field, value))
        wanted = f"bad message {tag(kind)!r}, field {field!r}: "
        assert str(caught.value).startswith(wanted), (kind, field, value)
        count += 1
    assert count > 300


def test_a_bound_is_allowed_itself() -> None:
    terms = Terms(MAX_VERSION, open_s=86_400.0)
    message = m.Open(2**53, 2**53, terms)
    assert codec.decode_from_agent(codec.encode(message)) == message


def test_a_code_that_nobody_knows_is_refused() -> None:
    frame = frame_with(m.Reject, "code", "no-such-code")
    with pytest.raises(ProtocolError, match="field 'code'"):
        codec.decode_from_agent(frame)


def test_codes_read_as_words() -> None:
    assert all(code.value == code.value.lower() and " " not in code.value for code in Code)
    assert len({code.value for code in Code}) == len(Code)


def test_every_number_and_text_has_a_bound() -> None:
    seen: set[type[Struct]] = set()

    def check(info: inspect.Type, where: str) -> None:
        match info:
            case inspect.IntType():
                assert info.ge is not None and info.le is not None, where
            case inspect.FloatType():
                assert (info.ge is not None or info.gt is not None) and info.le is not None, where
            case inspect.StrType():
                assert info.max_length is not None, where
            case inspect.StructType():
                if info.cls not in seen:
                    seen.add(info.cls)
                    for field in info.fields:
                        check(field.type, f"{info.cls.__name__}.{field.name}")
            case inspect.ListType():
                check(info.item_type, where)
            case inspect.TupleType():
                for each in info.item_types:
                    check(each, where)
            case inspect.UnionType():
                for each in info.types:
                    check(each, where)
            case _:
                pass

    for kind in MESSAGES:
        check(inspect.type_info(kind), kind.__name__)
    assert set(MESSAGES) <= seen
