from __future__ import annotations

from itertools import product

from pipecompile.distributed.protocol import HEAD_LENGTH, PROTOCOL, HeadField, Tag, tag_of

TEXT = """
message   tag      parts                       ahead   use
small     5n       [head + payload]            yes     a value with the layout of the last one of its name
large     5n       [head] [payload]            yes     the same, for a payload of more than small_bytes
changed   5n       [as small or large]         yes     payload is padding; a new one follows
new       5n + 1   [name + header] [payload]   no      no layout known: first value, object, sent once
abort     5n + 2                               no      never sent: a receive that times out closes the connections
layout    5n + 3   [name + header] [object]    no      before a value on a link of GPUs, if its layout is not agreed
row       5n + 4   [numbers]                   yes     before a call: what a rank is asked for, or the verdict on all

head   8 int64
0      CRC-32 of the name of the value
1      1 for small and large, 0 for changed
2      messages that the sender has received from this peer: an acknowledgement

credit         bound
small_bytes    131072 bytes of payload in one part with the head
posted_ahead   16 receives per peer
large_ahead    2 of them of large values
unsent         8 values of two parts per peer

store key                              writer               value
begun/{rank}                           the rank             its last exchange: first member, run, place in the run, topic
exchange/{first}/{exchange}/{member}   the member           topic, newline, text
failed                                 first failing rank   FailureReport
readers                                each other rank      number of ranks that have read FAILED
waits/{rank}                           the rank             AwaitedMessage, or empty
process/{rank}                         the rank             boot, namespace, number and start time of its process, or empty
ended/{rank}                           the rank             how its script has ended
pipelines/{rank}                       the rank             number of pipelines that it has made; of all pipelines of its ranks
thread/{rank}                          the rank             how one of its threads has ended by an exception; of all pipelines of its ranks
handling/{rank}                        the rank             the exception that its main thread handles, or empty; of all pipelines of its ranks
main/{rank}                            the rank             that its main thread has ended, and which threads run on; of all pipelines of its ranks
calls/{rank}                           the rank             pipeline in which it waits, awaited rank, serial number; of all pipelines of its ranks
save/{rank}                            the rank             the checkpoint that it saves; of all pipelines of its ranks
outcome/{first}/{run}                  the first to know    done, or the FailureReport with which a call is undone
stays/{rank}                           the rank             yes if it goes on without the copy of the rank that failed, else no
left                                   the first to know    numbers of the copies that go on
"""


def test_the_text_of_the_protocol() -> None:
    assert str(PROTOCOL) == TEXT.strip()


def test_tags_of_communicators_never_collide() -> None:
    tags = [tag_of(number, tag) for number in range(100) for tag in Tag]
    assert len(set(tags)) == len(tags)


def test_a_receive_posted_ahead_never_takes_a_message_of_another_tag() -> None:
    """Messages of a tag arrive in order, so all kinds of a tag are posted ahead, or none is."""
    for tag in Tag:
        assert len({kind.is_posted_ahead for kind in PROTOCOL.kinds if kind.tag is tag}) == 1
    assert {kind.tag for kind in PROTOCOL.kinds} == set(Tag)


def test_keys_of_the_store_never_collide() -> None:
    numbers = [*product(range(3), repeat=3)]
    keys = [key.at(*each) for key in PROTOCOL.keys for each in numbers]
    fields = [key.template.count("{") for key in PROTOCOL.keys]
    assert len(set(keys)) == sum(3**count for count in fields)


def test_the_head_has_room_for_its_fields() -> None:
    assert max(HeadField) < HEAD_LENGTH
