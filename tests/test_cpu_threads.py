"""How many CPU threads the engine gets and where they run, decided over a fake system."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mistralrs_sdk import ConfigError
from mistralrs_sdk.config import MAX_THREADS
from mistralrs_sdk.cpu_threads import (
    CpuThreads,
    choose_threads,
    format_cpulist,
    high_capacity_cpus,
    parse_cpulist,
)
from mistralrs_sdk.switches import switched_on

STRONG = frozenset(range(10, 20))
"""The high-capacity CPUs of `big_little`."""


def system(
    *, capacities: dict[int, object] | None = None, smt: int = 0, quota: str = "max 100000"
) -> dict[str, str]:
    """The files of a Linux system; `smt` CPUs from 0 on are pairs of hyperthreads."""
    cpu = "/sys/devices/system/cpu/cpu{}/"
    files = {"/sys/fs/cgroup/cpu.max": quota}
    for number, capacity in (capacities or {}).items():
        files[cpu.format(number) + "cpu_capacity"] = f"{capacity}\n"
    for number in range(smt):
        pair = number // 2 * 2
        files[cpu.format(number) + "topology/thread_siblings_list"] = f"{pair}-{pair + 1}\n"
    return files


def big_little(**others) -> dict[str, str]:
    """Twenty CPUs: ten of capacity 718, then ten of 1024."""
    return system(capacities={cpu: 718 if cpu < 10 else 1024 for cpu in range(20)}, **others)


def choose(environ=(), *, files=None, user=None, allowed=range(20), can_pin=True) -> CpuThreads:
    """Choose on a system of twenty equal cores unless told otherwise."""
    return choose_threads(
        dict(environ),
        user=user,
        allowed=frozenset(allowed),
        read=(system() if files is None else files).get,
        can_pin=can_pin,
    )


# the list of CPUs


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("5-9,15-19", (5, 6, 7, 8, 9, 15, 16, 17, 18, 19)),
        (" 3, 1-2 ,,2", (1, 2, 3)),
        ("7-7", (7,)),
        ("\t0\n", (0,)),
        (",4,", (4,)),
    ],
)
def test_cpulist_is_sorted_and_each_cpu_is_there_once(text, cpus):
    """V22: numbers and ranges; blanks around parts and empty parts do not count."""
    assert parse_cpulist(text) == cpus


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("4-2", "ends before it starts"),
        ("a", "neither a CPU number nor a range"),
        ("", "names no CPU"),
        (" , ,", "names no CPU"),
        ("-3", "neither"),
        ("3-", "neither"),
        ("1-2-3", "neither"),
        ("1 - 2", "neither"),
        ("+1", "neither"),
        ("1_0", "neither"),
        ("\u0663", "neither"),
        ("0x3", "neither"),
        ("1.5", "neither"),
        ("0-99999999999999", "goes beyond"),
        ("9" * 5000, "neither"),
        ("0-8:2/4", "stride"),
        ("3,0-8:2", "stride"),
    ],
)
def test_a_malformed_cpulist_is_refused(text, why):
    """V22: what is not in the grammar is an error that says what is wrong."""
    with pytest.raises(ValueError, match=why):
        parse_cpulist(text)


@given(st.sets(st.integers(0, 200), min_size=1))
def test_a_formatted_cpulist_reads_back(cpus):
    """Formatting and parsing are inverse."""
    assert parse_cpulist(format_cpulist(cpus)) == tuple(sorted(cpus))


def test_a_cpulist_is_formatted_in_runs():
    """Neighbours become a range."""
    assert format_cpulist([8, 0, 1, 2, 3]) == "0-3,8"
    assert format_cpulist([]) == ""


# capacities


def test_cpus_near_the_greatest_capacity_are_the_strong_ones():
    """V23: ten of 718 and ten of 1024 give the ten of 1024; nine tenths are enough."""
    assert high_capacity_cpus(range(20), read=big_little().get) == STRONG
    tiers = system(capacities={0: 300, 1: 900, 2: 899, 3: 1000})
    assert high_capacity_cpus(range(4), read=tiers.get) == {1, 3}


@pytest.mark.parametrize(
    "capacities",
    [
        dict.fromkeys(range(20), 1024),
        {cpu: 718 if cpu < 10 else 1024 for cpu in range(20) if cpu != 7},
        {0: 718, 1: "garbage"},
        {0: 718, 1: ""},
        {0: 900, 1: 1000},
        {0: 0, 1: 0},
        {0: 1024},
        {},
    ],
    ids=["equal", "one missing", "garbage", "blank", "within a tenth", "zero", "one", "none"],
)
def test_no_cpus_are_strong_where_all_are_alike_or_one_is_unknown(capacities):
    """V23: equal or nearly equal, unreadable, or a single CPU: none is preferred."""
    cpus = range(20) if len(capacities) > 2 else range(len(capacities))
    assert high_capacity_cpus(cpus, read=system(capacities=capacities).get) is None


# the number of threads


@pytest.mark.parametrize("user", [None, 3])
@pytest.mark.parametrize("candle", [None, "10"])
@pytest.mark.parametrize("rayon", [None, "6"])
@pytest.mark.parametrize("mask", [None, "15-19"])
@pytest.mark.parametrize("affinity", [None, "1"])
@pytest.mark.parametrize("mixed", [False, True])
def test_every_combination_of_settings_follows_the_precedence(
    user, candle, rayon, mask, affinity, mixed
):
    """V24: user, CANDLE, RAYON, mask, strong cores, cores; what pins does not depend on counts."""
    values = {
        "CANDLE_NUM_THREADS": candle,
        "RAYON_NUM_THREADS": rayon,
        "CANDLE_CPU_MASK": mask,
        "CANDLE_CPU_AFFINITY": affinity,
    }
    environ = {name: value for name, value in values.items() if value is not None}
    ranked = [
        (user, 3, "user"),
        (candle, 10, "CANDLE_NUM_THREADS"),
        (rayon, 6, "RAYON_NUM_THREADS"),
        (mask, 5, "size of CANDLE_CPU_MASK"),
        (mixed or None, 10, "high-capacity cores of this process"),
        (True, 20, "physical cores of this process"),
    ]
    number, origin = next((n, origin) for asked, n, origin in ranked if asked is not None)

    threads = choose(environ, user=user, files=big_little() if mixed else system())

    assert (threads.num_threads, threads.origin) == (number, origin)
    if mask:
        assert (threads.pinned, threads.pinned_by) == (frozenset(range(15, 20)), "CANDLE_CPU_MASK")
    elif affinity and mixed:
        assert (threads.pinned, threads.pinned_by) == (STRONG, "CANDLE_CPU_AFFINITY")
    else:
        assert (threads.pinned, threads.pinned_by) == (None, "")


def test_hyperthreads_count_once_among_strong_cores_too():
    """Sixteen CPUs of which the strong eight are four cores: four threads."""
    capacities = {cpu: 1024 if cpu < 8 else 500 for cpu in range(16)}

    threads = choose(files=system(capacities=capacities, smt=8), allowed=range(16))

    assert threads.num_threads == 4


@pytest.mark.parametrize(
    ("allowed", "number", "origin"),
    [
        (range(5, 15), 5, "high-capacity cores of this process"),
        (range(8), 8, "physical cores of this process"),
        (range(12, 18), 6, "physical cores of this process"),
    ],
    ids=["both kinds", "weak only", "strong only"],
)
def test_defaults_stay_within_the_allowed_cpus(allowed, number, origin):
    """Only CPUs of this process count, and are compared with each other only."""
    threads = choose({"CANDLE_CPU_AFFINITY": "1"}, files=big_little(), allowed=allowed)

    assert (threads.num_threads, threads.origin) == (number, origin)
    assert threads.pinned is None or threads.pinned <= set(allowed)


@pytest.mark.parametrize("environ", [{}, {"CANDLE_CPU_MASK": "10-19"}], ids=["cores", "mask"])
@pytest.mark.parametrize(
    ("quota", "number"), [("400000 100000", 4), ("350000 100000", 3), ("50000 100000", 1)]
)
@pytest.mark.parametrize("mixed", [False, True])
def test_defaults_stay_within_the_quota_of_the_cgroup(environ, quota, number, mixed):
    """Every default is cut to the whole CPUs granted, at least one, and says so."""
    files = big_little(quota=quota) if mixed else system(quota=quota)

    threads = choose(environ, files=files)

    assert threads.num_threads == number
    assert threads.origin.endswith(", limited by the CPU quota of the cgroup")
    assert not threads.warnings


def test_a_number_that_was_asked_for_is_taken_with_a_warning_if_it_is_too_many():
    """More threads than CPUs, or than the quota grants, wait for each other."""
    many = choose({"CANDLE_NUM_THREADS": "30"})
    assert many.num_threads == 30
    assert "CANDLE_NUM_THREADS (30) is more than the CPUs they may run on (0-19)" in str(
        many.warnings
    )

    masked = choose({"CANDLE_CPU_MASK": "3,4"}, user=3)
    assert masked.num_threads == 3
    assert "num_threads (3) is more than the CPUs they may run on (3-4)" in str(masked.warnings)

    throttled = choose({"RAYON_NUM_THREADS": "3"}, files=system(quota="250000 100000"))
    assert throttled.num_threads == 3
    assert "RAYON_NUM_THREADS (3) is more than the 2.5 CPUs that the cgroup grants" in str(
        throttled.warnings
    )
    assert not choose(user=20).warnings


def test_a_number_too_high_for_a_setting_is_not_chosen_by_default():
    """A machine with more cores than `num_threads` may be gets as many as it may be."""
    assert choose(allowed=range(2000)).num_threads == MAX_THREADS


@pytest.mark.parametrize("name", ["CANDLE_NUM_THREADS", "RAYON_NUM_THREADS"])
@pytest.mark.parametrize("value", ["0", "-1", "four", "1.5", "+2", "1_0", "1025", "9" * 5000])
@pytest.mark.parametrize("user", [None, 2])
def test_a_malformed_number_is_refused_by_name(name, value, user):
    """Variable, value and range are in the error, even if something stronger decides."""
    with pytest.raises(ConfigError, match=rf"^{name} \('.*'\) must be a whole number from 1"):
        choose({name: value}, user=user)


@pytest.mark.parametrize("blank", ["", "  "])
def test_a_blank_variable_counts_as_unset(blank):
    """`NAME= command` switches nothing on and is no error."""
    names = (
        "CANDLE_NUM_THREADS",
        "RAYON_NUM_THREADS",
        "CANDLE_CPU_MASK",
        "CANDLE_CPU_AFFINITY",
    )
    assert choose(dict.fromkeys(names, blank), files=big_little()) == choose(files=big_little())


# pinning


@pytest.mark.parametrize("text", ["4-2", "a", ",,", "0-8:2/4"])
def test_a_malformed_mask_is_refused_by_name(text):
    """Variable, value, what is wrong and the grammar are in the error."""
    with pytest.raises(ConfigError, match=r"^CANDLE_CPU_MASK \('.*'\): .*ranges separated by"):
        choose({"CANDLE_CPU_MASK": text}, user=1)


def test_cpus_of_the_mask_that_are_not_allowed_are_left_out_with_one_warning():
    """The number of threads is that of the CPUs that remain."""
    threads = choose({"CANDLE_CPU_MASK": "2-9"}, allowed=(0, 1, 2, 3, 5))

    assert threads.pinned == {2, 3, 5}
    assert threads.num_threads == 3
    (warning,) = threads.warnings
    assert warning == (
        "CANDLE_CPU_MASK (2-9): this process may use the CPUs 0-3,5 only; left out: 4,6-9"
    )


def test_a_mask_without_an_allowed_cpu_is_refused():
    """The error says which CPUs there are."""
    with pytest.raises(ConfigError, match=r"CANDLE_CPU_MASK \(8-9\) names no CPU.*use 0-3;"):
        choose({"CANDLE_CPU_MASK": "8-9"}, allowed=range(4))


@pytest.mark.parametrize(
    ("value", "on"),
    [
        *((value, True) for value in ("1", "TRUE", "yes", "2")),
        *((value, False) for value in ("0", "False", "no", "OFF", " 0 ", "")),
    ],
)
def test_a_switch_is_on_unless_it_says_no(value, on):
    """0, false, no, off and blanks are off, in any case; anything else is on."""
    assert switched_on({"CANDLE_CPU_AFFINITY": value}, "CANDLE_CPU_AFFINITY") is on
    assert (choose({"CANDLE_CPU_AFFINITY": value}, files=big_little()).pinned == STRONG) is on


def test_affinity_where_all_cpus_are_alike_says_that_it_has_no_effect():
    """Asked for and not possible: one warning. With a mask, the mask decides."""
    (warning,) = choose({"CANDLE_CPU_AFFINITY": "1"}).warnings
    assert "CANDLE_CPU_AFFINITY (1) has no effect" in warning
    assert not choose({"CANDLE_CPU_AFFINITY": "1", "CANDLE_CPU_MASK": "1"}).warnings


def test_a_system_that_cannot_pin_says_so_and_ignores_the_mask():
    """Neither pinned nor counted: macOS has no CPU masks."""
    environ = {"CANDLE_CPU_MASK": "0-3", "CANDLE_CPU_AFFINITY": "1"}

    threads = choose(environ, can_pin=False)

    assert (threads.num_threads, threads.pinned) == (20, None)
    mask, affinity = threads.warnings
    assert "CANDLE_CPU_MASK (0-3) has no effect" in mask
    assert "CANDLE_CPU_AFFINITY (1) has no effect" in affinity


@given(
    st.sets(st.integers(0, 31), min_size=1),
    st.sets(st.integers(0, 31), min_size=1),
    st.lists(st.integers(0, 1024), min_size=32, max_size=32),
    st.integers(1, 64),
)
def test_no_default_leaves_the_cpus_and_the_quota_of_the_process(allowed, mask, capacities, tenths):
    """Whatever the machine: 1 <= threads <= CPUs and quota, pinned within the allowed."""
    files = system(capacities=dict(enumerate(capacities)), quota=f"{tenths}0000 100000")
    for environ in ({}, {"CANDLE_CPU_AFFINITY": "1"}, {"CANDLE_CPU_MASK": format_cpulist(mask)}):
        if "CANDLE_CPU_MASK" in environ and not mask & allowed:
            continue
        threads = choose(environ, files=files, allowed=allowed)
        room = threads.pinned or allowed
        assert 1 <= threads.num_threads <= max(1, min(len(room), tenths // 10))
        assert room <= allowed
