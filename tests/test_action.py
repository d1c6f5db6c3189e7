"""Actions and their text."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeloom import Action, Kind
from pipeloom.errors import ActionError
from strategies import actions

F0, B1 = Action(0, Kind.F, 0), Action(12, Kind.B, 345)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F0", F0),
        ("12B345", B1),
        ("2I0", Action(2, Kind.I, 0)),
        ("2W0", Action(2, Kind.W, 0)),
        ("2SEND_F0", Action(2, Kind.SEND_F, 0)),
        ("3RECV_F0", Action(3, Kind.RECV_F, 0)),
        ("3SEND_B0", Action(3, Kind.SEND_B, 0)),
        ("2RECV_B0", Action(2, Kind.RECV_B, 0)),
        ("0SEND_F1>3", Action(0, Kind.SEND_F, 1, (), 3)),
        ("3RECV_F1<0", Action(3, Kind.RECV_F, 1, (), 0)),
        ("3SEND_B1>0", Action(3, Kind.SEND_B, 1, (), 0)),
        ("0RECV_B1<3", Action(0, Kind.RECV_B, 1, (), 3)),
        ("2UNSHARD", Action(2, Kind.UNSHARD)),
        ("2RESHARD", Action(2, Kind.RESHARD)),
        ("2REDUCE_GRAD", Action(2, Kind.REDUCE_GRAD)),
        ("(0F0;12B345)OVERLAP_F_B", Action(-1, Kind.OVERLAP_F_B, -1, (F0, B1))),
        ("(0F0;12B345;0F0)OVERLAP_F_B", Action(-1, Kind.OVERLAP_F_B, -1, (F0, B1, F0))),
        ("999999F999999", Action(999_999, Kind.F, 999_999)),
    ],
)
def test_text_and_back(text: str, action: Action) -> None:
    assert Action.parse(text) == action
    assert str(action) == text
    assert repr(action) == f"Action.parse({text!r})"


@given(actions())
def test_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_blanks_around_parts_are_read() -> None:
    assert Action.parse("( 0F0 ;\t12B345 )OVERLAP_F_B") == Action.parse("(0F0;12B345)OVERLAP_F_B")


def test_computes() -> None:
    pair = Action.parse("(0F0;12B345)OVERLAP_F_B")
    assert pair.computes == (F0, B1)
    assert F0.computes == (F0,)
    assert Action.parse("0SEND_F0").computes == ()
    assert Action.parse("0UNSHARD").computes == ()


@pytest.mark.parametrize(
    ("text", "at", "length", "message", "hint"),
    [
        ("", 0, 1, "the stage number is missing", "stage, kind, microbatch: 2F0"),
        ("F0", 0, 1, "the stage number is missing", "stage, kind, microbatch: 2F0"),
        ("0", 1, 1, "the kind of action is missing", "0F0"),
        ("0F", 2, 1, "the microbatch number is missing", "2F0"),
        ("0F0x", 3, 1, "'0F0' is whole", "end the cell there"),
        ("0F0 1F0", 3, 1, "'0F0' is whole", "write a comma"),
        ("0F0 # first", 3, 1, "'0F0' is whole", "a comment takes a line of its own"),
        ("0F0\n", 3, 1, "'0F0' is whole", "end the cell"),
        (" 0F0", 0, 1, "the stage number is missing", "2F0"),
        ("-1F0", 0, 1, "the stage is negative", "count from 0"),
        ("0F-1", 2, 1, "the microbatch is negative", "count from 0"),
        ("0SEND_F0>-1", 9, 1, "the far stage is negative", "count from 0"),
        ("0SEND_F0>", 9, 1, "the far stage number is missing", "2F0"),
        ("01F0", 0, 2, "the stage number has a leading zero", "write 1"),
        ("0F00", 2, 2, "the microbatch number has a leading zero", "write 0"),
        ("1000000F0", 0, 7, "the stage number is too large", "at most 999999"),
        ("0F" + "9" * 5000, 2, 5000, "the microbatch number is too large", "at most 999999"),
        ("٣F0", 0, 1, "'٣' is not one of the digits 0 to 9", "write 3"),
        ("0F\uff10", 2, 1, "'\uff10' is not one of the digits 0 to 9", "write 0"),
        ("0F²", 2, 1, "the microbatch number is missing", "2F0"),
        ("0f0", 1, 1, "'f' is not a kind of action", "kinds are upper case: F"),
        ("0send_f0", 1, 6, "'send_f' is not a kind of action", "kinds are upper case: SEND_F"),
        ("0X0", 1, 1, "'X' is not a kind of action", "kinds are F, B, I, W, SEND_F"),
        ("0OVERLAP_F_B0", 1, 11, "'OVERLAP_F_B' is not a kind of action", "follows a bracket"),
        ("0UNSHARD12", 8, 2, "UNSHARD takes no microbatch", "it concerns the whole stage: 0UNSHARD"),
        ("0F0>3", 3, 1, "F takes no '>'", "0SEND_F0>3 and 3RECV_F0<0"),
        ("0SEND_F0<3", 8, 1, "SEND_F takes no '<'", "0SEND_F0>3 and 3RECV_F0<0"),
        ("3RECV_F0>0", 8, 1, "RECV_F takes no '>'", "0SEND_F0>3 and 3RECV_F0<0"),
        ("(0F0;1B0", 8, 1, "the bracket is not closed", "(0F7;7B3)OVERLAP_F_B"),
        ("()OVERLAP_F_B", 1, 1, "the stage number is missing", "2F0"),
        ("(0F0)OVERLAP_F_B", 0, 5, "a composite has one part", "or write the action alone"),
        ("(0F0;)OVERLAP_F_B", 5, 1, "the stage number is missing", "2F0"),
        ("(0F0,1B0)OVERLAP_F_B", 4, 1, "'0F0' is whole", "parts are parted by ';'"),
        ("(0F0;1SEND_F0)OVERLAP_F_B", 5, 8, "'1SEND_F0' cannot be part of a composite", "F, B, I or W"),
        ("((0F0;1B0)OVERLAP_F_B;2W0)OVERLAP_F_B", 1, 1, "the stage number is missing", "2F0"),
        ("(0F0;1B0)", 9, 1, "a composite ends with its kind", "write OVERLAP_F_B right after the bracket"),
        ("(0F0;1B0)OVERLAP", 9, 1, "a composite ends with its kind", "write OVERLAP_F_B"),
        ("(0F0;1B0)OVERLAP_F_B0", 20, 1, "'(0F0;1B0)OVERLAP_F_B' is whole", "end the cell there"),
        ("(0F0;01B0)OVERLAP_F_B", 5, 2, "the stage number has a leading zero", "write 1"),
    ],
)
def test_mistakes_say_where_and_what_would_be_right(text: str, at: int, length: int, message: str, hint: str) -> None:
    with pytest.raises(ActionError) as caught:
        Action.parse(text)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert (caught.value.at, caught.value.length) == (at, length)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


@given(st.one_of(st.text(), st.text(alphabet="0129FBIWSENDRCV_(;)<> \t"), st.text(alphabet="0F(;)", max_size=12)))
@example("(0F0;" + "1B0;" * 10_000 + "x)OVERLAP_F_B")
@example("0" + "X" * 100_000)
def test_any_text_is_an_action_or_a_mistake(text: str) -> None:
    read = action_or_mistake(text)
    if isinstance(read, Action):
        assert str(read) == text.replace(" ", "").replace("\t", "")
    else:
        assert 0 <= read.at <= len(text)
        assert read.length >= 1
        assert len(str(read)) < 1000


NUMBER = "(0|[1-9][0-9]{0,5})"
COMPUTE = f"{NUMBER}[FBIW]{NUMBER}"
PART = f"[ \\t]*{COMPUTE}[ \\t]*"
ANY = "|".join(
    [
        COMPUTE,
        rf"\({PART}(;{PART})+\)OVERLAP_F_B",
        f"{NUMBER}SEND_[FB]{NUMBER}(>{NUMBER})?",
        f"{NUMBER}RECV_[FB]{NUMBER}(<{NUMBER})?",
        f"{NUMBER}(UNSHARD|RESHARD|REDUCE_GRAD)",
    ]
)


@st.composite
def nearly_actions(draw: st.DrawFn) -> str:
    """The text of an action with a few characters put in, put out or changed."""
    text = str(draw(actions()))
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(start + 2, len(text))))
        text = text[:start] + draw(st.text(alphabet="0129FBIW_SENDRCV(;)<>- \t\n", max_size=2)) + text[end:]
    return text


@given(nearly_actions())
def test_the_grammar_decides_what_is_an_action(text: str) -> None:
    assert isinstance(action_or_mistake(text), Action) == bool(re.fullmatch(ANY, text))


def action_or_mistake(text: str) -> Action | ActionError:
    try:
        return Action.parse(text)
    except ActionError as error:
        return error
