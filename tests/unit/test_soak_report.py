"""The soak's figures and its verdict; no process is harmed."""

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shmoffload.errors import BadInputError
from shmoffload.testing.soak import watch
from shmoffload.testing.soak.cost import Spectrum, mixed
from shmoffload.testing.soak.plan import LIVE, SECOND, Fault, Stage, faults_of
from shmoffload.testing.soak.report import Half, SoakReport
from shmoffload.testing.soak.settings import SoakSettings, live_config, second_config
from shmoffload.testing.soak.watch import Resources

ROOT = Path(__file__).parents[2]
KILL = Fault("worker SIGKILL", Stage.LOAD)
START = Fault("worker SIGKILL", Stage.STARTING)
CALM = Resources(
    engine_fds=20,
    engine_rss_bytes=30 << 20,
    supervisor_fds=13,
    supervisor_rss_bytes=12 << 20,
    worker_fds=39,
    shm_bytes=1 << 20,
    num_names=3,
    num_processes=4,
)


def spectrum_of(*times_us):
    spectrum = Spectrum()
    for time_us in times_us:
        spectrum.add(time_us * 1000)
    return spectrum


def half(*, steps=1000, requests=100, time_us=100):
    return Half(
        pieces=1,
        seconds=10.0,
        steps=steps,
        requests=requests,
        blocks_compared=5,
        costs={"lookup": spectrum_of(*[time_us] * 200)},
    )


def green(**changed):
    report = SoakReport(seed=1, minutes=1.0, min_faults=3, wanted=[KILL, START])
    report.struck = {KILL: 3, START: 1}
    report.quiet, report.faulty = half(), half()
    report.looks = [CALM, CALM]
    for name, value in changed.items():
        setattr(report, name, value)
    return report


# Cost ---------------------------------------------------------------------------------


@pytest.mark.parametrize("percent", [1, 50, 90, 99, 100])
def test_percentiles_are_right_to_three_percent(percent):
    rng = random.Random(1)
    times = sorted(int(rng.lognormvariate(9, 2)) for _ in range(5000))
    spectrum = Spectrum()
    for time_ns in times:
        spectrum.add(time_ns)
    exact_ns = times[math.ceil(len(times) * percent / 100) - 1]
    found_ns = spectrum.percentile_us(percent) * 1000
    assert exact_ns <= found_ns * 1.001
    assert found_ns <= exact_ns * (1 + 1 / 32)


@pytest.mark.parametrize("time_ns", [0, 1, 31, 32, 63, 64, 65, 127, 128, 10**9])
def test_one_time_is_its_own_percentile(time_ns):
    spectrum = Spectrum()
    spectrum.add(time_ns)
    found_ns = spectrum.percentile_us(99) * 1000
    assert time_ns <= found_ns + 1e-6 <= time_ns * (1 + 1 / 32) + 1e-6


def test_an_endless_call_is_counted_and_an_empty_spectrum_is_zero():
    spectrum = Spectrum()
    assert spectrum.percentile_us(99) == 0
    spectrum.add(1 << 60)
    assert spectrum.num_calls == 1
    assert spectrum.percentile_us(99) > 1e9


def test_many_cheap_calls_do_not_hide_the_dear_ones():
    quiet = {"lookup": spectrum_of(*[1] * 100), "store": spectrum_of(*[100] * 10)}
    faulty = {
        "lookup": spectrum_of(*[1] * 9990),
        "store": spectrum_of(*[1000] * 10),
        "other": spectrum_of(10**6),
    }
    assert mixed(faulty).percentile_us(99) < 2
    alike = mixed(faulty, quiet)
    assert alike.num_calls == pytest.approx(110)
    assert alike.percentile_us(99) == pytest.approx(1000, rel=0.04)
    report = green(quiet=replace(half(), costs=quiet))
    report.faulty = replace(half(), costs=faulty)
    assert report.cpu_ratio == pytest.approx(10, rel=0.1)


# Verdict ------------------------------------------------------------------------------


def test_a_good_run_is_green():
    report = green()
    assert report.reasons() == []
    assert report.to_json()["ok"]
    assert report.summary().endswith("green")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"wrong_bytes": 1}, "1 loaded blocks had a wrong byte"),
        ({"quiet": replace(half(), blocks_compared=0)}, "no loaded block was"),
        ({"faulty": replace(half(), blocks_compared=0)}, "no loaded block was"),
        ({"problems": ["the core broke"]}, "the core broke"),
        ({"struck": {KILL: 9}}, "worker SIGKILL, starting: never struck"),
        ({"struck": {KILL: 2, START: 9}}, "2 faults struck an open job: 3 were asked"),
        ({"faulty": half(steps=400)}, "steps per second fell to 0.40"),
        ({"faulty": half(requests=49)}, "requests per second fell to 0.49"),
        ({"faulty": Half()}, "steps per second fell to 0.00"),
        ({"faulty": half(time_us=250)}, "manager call rose by 2.5"),
        ({"looks": [CALM]}, "looked at less than twice"),
        (
            {"looks": [CALM, replace(CALM, engine_rss_bytes=100 << 20)]},
            "engine_rss_bytes rose from 31457280 to 104857600",
        ),
    ],
)
def test_what_is_not_green_says_why(changed, words):
    report = green(**changed)
    assert any(words in reason for reason in report.reasons()), report.reasons()
    assert not report.to_json()["ok"]
    assert "NOT GREEN" in report.summary()


def test_twice_the_cpu_and_half_the_pace_are_still_green():
    report = green(faulty=half(steps=500, requests=50, time_us=190))
    assert report.reasons() == []


def test_faults_at_starts_are_counted_apart():
    report = green(struck={KILL: 3, START: 40})
    assert report.num_faults == 3
    assert report.num_starting == 40
    assert report.to_json()["faults"] == {
        "worker SIGKILL": {"mid-load": 3, "starting": 40}
    }


def test_the_json_can_be_read_and_has_its_keys():
    read = json.loads(json.dumps(green().to_json()))
    assert {
        "version",
        "ok",
        "reasons",
        "seed",
        "minutes",
        "seconds",
        "num_faults",
        "faults",
        "without_faults",
        "with_faults",
        "call_cpu_p99_us",
        "ratios",
        "wrong_bytes",
        "num_quiescent",
        "resources",
    } <= set(read)
    assert read["resources"]["first"]["engine_fds"] == 20
    assert read["with_faults"]["steps_per_s"] == 100
    green(looks=[]).to_json()


# Resources ----------------------------------------------------------------------------


def test_one_look_shows_a_leak_of_anything_but_memory():
    assert watch.excess(CALM, CALM) == []
    few = replace(CALM, supervisor_fds=16, engine_rss_bytes=10**9)
    assert watch.excess(CALM, few) == []
    leaked = replace(CALM, supervisor_fds=17, num_names=4)
    assert watch.excess(CALM, leaked) == [
        "supervisor_fds rose from 13 to 17: 16 is allowed",
        "num_names rose from 3 to 4: 3 is allowed",
    ]


def test_memory_may_breathe_but_not_grow():
    high = replace(CALM, engine_rss_bytes=500 << 20)
    assert watch.growth([CALM, high, CALM, high]) == []
    assert len(watch.growth([CALM, CALM, high, high])) == 1


def test_a_look_sees_this_process():
    before = watch.look("nobody-has-this", supervisor_pid=0, worker_pids=[0])
    with Path(os.devnull).open() as file:
        after = watch.look(
            "nobody-has-this", supervisor_pid=os.getpid(), worker_pids=[0]
        )
        assert file.fileno() >= 0
    assert after.engine_fds == before.engine_fds + 1
    assert before.engine_rss_bytes > 1 << 20
    assert before.num_names == before.num_processes == before.supervisor_fds == 0
    assert after.supervisor_rss_bytes > 1 << 20


# Settings -----------------------------------------------------------------------------


def settings(**changed):
    wanted = {"minutes": 1.0, "seed": 1, "session": "s", "folder": Path("/tmp/none")}
    return SoakSettings(**{**wanted, **changed})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"minutes": 0}, "0 minutes are out of range: give more than 0"),
        ({"minutes": math.nan}, "nan minutes"),
        ({"minutes": 1e9}, "at most 10080"),
        ({"session": "x" * 27}, "take 1 to 26 of"),
        ({"kinds": ("worker SIGKIL",)}, "did you mean worker SIGKILL"),
    ],
)
def test_settings_that_cannot_work_are_refused(changed, words):
    with pytest.raises(BadInputError, match=words):
        settings(**changed).check()


def test_both_sessions_are_configurations_and_have_names_of_their_own():
    wanted = settings(session="x" * 26)
    wanted.check()
    live = live_config(wanted, 500)
    second = second_config(wanted.second_session, Path("/tmp/none"), 500)
    assert [tier.type for tier in live.tier] == ["faulty", "faulty", "memory"]
    assert len({live.session.name, second.session.name}) == 2
    assert not watch.names_of(live.session.name)


def test_every_kind_names_whom_it_strikes():
    who = {fault.who for fault in faults_of(LIVE)} | {
        fault.who for fault in faults_of(SECOND)
    }
    assert who == {"worker", "supervisor", "engine", "call", "disk", "answer"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--minutes", "0"], "soak: 0 minutes are out of range"),
        (["--kind", "worker flu"], 'soak: there is no fault "worker flu"'),
        (["--minutes", "ten"], "invalid float value"),
    ],
)
def test_the_tool_refuses_bad_input_in_words(words, said):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/soak.py"), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
