"""`mistralrs-sdk doctor`: what each check says of machines that are and are not in order."""

from __future__ import annotations

import json
import urllib.error

import pytest

from mistralrs_sdk.cli import doctor, doctor_checks, main, self_check

CPUINFO = "model name\t: Some CPU\nflags\t\t: fpu avx2 fma f16c avx512f\n\nmodel name\t: other\n"
TORCH = {"version": "2.13.0", "cuda": None, "devices": [], "mps": False}
USED = {
    "torch": TORCH,
    "settings": {
        "device": ["cpu", "best device of this machine"],
        "attention": ["CpuBackend", "automatic"],
        "weights": ["0.6 MiB", "F16 x15"],
        "num_threads": ["2", "physical cores"],
    },
    "free_bytes": 2**33,
    "used": [1.001, -2.0],
    "exact": [1.0, -2.0],
    "quantised": [1.05, -2.0],
}
REFERENCE = {"exact": [1.0, -2.0]}


def by_name(findings):
    return {finding.name: finding for finding in findings}


def with_settings(**rows):
    return USED | {"settings": USED["settings"] | rows}


@pytest.fixture
def offline(monkeypatch):
    """No network is touched, and nothing is run in a process of its own."""
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: True)
    results = {"used": USED, "reference": REFERENCE}
    monkeypatch.setattr(doctor, "_self_check", results.__getitem__)
    return results


def test_doctor_lists_every_check_as_json(offline, capsys):
    """Name, status, detail and suggestion of each; 0 where nothing is broken."""
    assert main(["doctor", "--json"]) == 0

    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    expected = {"system", "cpu", "compiler", "torch", "gpu", "kernels", "threads", "memory"}
    assert expected | {"self-check", "hub", "hub cache", "disk", "extras"} <= checks.keys()
    assert checks["self-check"]["status"] == "ok"
    assert "HF_HUB_OFFLINE" in checks["hub"]["detail"]


def test_something_broken_ends_with_1_and_a_suggestion(offline, capsys):
    """The suggestion stands under the line it belongs to."""
    offline["used"] = {"failed": "ImportError: libgomp.so.1"}

    assert main(["doctor"]) == 1

    out = capsys.readouterr().out.splitlines()
    (place,) = (i for i, line in enumerate(out) if "libgomp.so.1" in line)
    assert out[place].startswith("failure")
    assert "->" in out[place + 1]


@pytest.mark.parametrize(
    ("info", "status", "shown"),
    [
        (CPUINFO, "ok", "Some CPU"),
        (CPUINFO, "ok", "avx2, f16c, fma, avx512f"),
        ("model name : Old\nflags : sse2\n", "warning", "Old"),
        ("CPU part : 0xd0c\nFeatures : asimd asimddp\n", "ok", "asimd, asimddp"),
        ("", "ok", "no vector instructions known"),
    ],
)
def test_the_cpu_is_told_with_what_speeds_it_up(info, status, shown):
    """An x86 CPU without AVX2 is a warning; where nothing is known, nothing is claimed."""
    found = by_name(doctor_checks.machine(read=lambda file: info))["cpu"]

    assert found.status == status
    assert shown in found.detail


def test_a_missing_compiler_says_how_to_get_one(tmp_path):
    """Without a compiler on the PATH, or where CXX names none."""
    for environ in ({"PATH": str(tmp_path)}, {"PATH": str(tmp_path), "CXX": "no-such-c++"}):
        found = doctor_checks.compiler(environ)
        assert found.status == "warning"
        assert "apt install g++" in str(found.suggestion)
        assert environ.get("CXX", "g++") in found.detail


def test_a_compiler_that_does_not_run_is_a_failure(tmp_path):
    """Found, but of no use."""
    file = tmp_path / "g++"
    file.write_text("#!/bin/sh\nexit 3\n")
    file.chmod(0o755)

    assert doctor_checks.compiler({"PATH": f"{tmp_path}:/bin"}).status == "failure"


def test_slow_kernels_are_a_warning_with_their_reason():
    """A CPU that attends in torch says why; a GPU may."""
    slow = with_settings(attention=["SdpaBackend", "CpuBackend: no C++ compiler"])
    gpu = with_settings(attention=["SdpaBackend", "automatic"], device=["cuda", "best"])

    assert by_name(doctor_checks.engine(USED, REFERENCE))["kernels"].status == "ok"
    found = by_name(doctor_checks.engine(slow, REFERENCE))["kernels"]
    assert found.status == "warning"
    assert "no C++ compiler" in found.detail
    assert by_name(doctor_checks.engine(gpu, REFERENCE))["kernels"].status == "ok"


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"exact": [1.001, -2.0]}, "exact"),
        ({"used": [1.2, -2.0]}, "used"),
        ({"quantised": [1.0, -1.0]}, "quantised"),
        ({"exact": [float("nan"), -2.0]}, "exact"),
    ],
)
def test_results_that_differ_by_more_than_rounding_are_a_failure(changed, wrong):
    """Each way of computing has a limit of its own; what is no number is over all of them."""
    found = by_name(doctor_checks.engine(USED | changed, REFERENCE))["self-check"]

    assert found.status == "failure"
    assert str(found.suggestion).startswith(wrong)


def test_without_a_reference_the_check_is_a_warning():
    """What cannot be compared is not called right."""
    found = by_name(doctor_checks.engine(USED, {"failed": "killed"}))["self-check"]

    assert (found.status, "killed" in found.detail) == ("warning", True)


def test_gpus_are_told():
    """Those torch sees; a driver without one is a warning; none at all is a note."""
    device = {"name": "H", "compute": "9.0", "free_bytes": 2**36, "total_bytes": 2**37}

    seen = by_name(doctor_checks.gpu(TORCH | {"devices": [device]}, has_driver=True))
    assert seen["cuda:0"].detail == "H, compute 9.0, 64.0 GiB of 128.0 GiB free"
    assert "flashinfer" in seen
    (hidden,) = doctor_checks.gpu(TORCH, has_driver=True)
    assert (hidden.status, "the CPU only" in hidden.detail) == ("warning", True)
    (none,) = doctor_checks.gpu(TORCH, has_driver=False)
    assert none.status == "note"
    (apple,) = doctor_checks.gpu(TORCH | {"mps": True}, has_driver=False)
    assert apple.status == "ok"


class Answer:
    def close(self):
        pass


def refuses(error):
    def open_url(asked, timeout):
        raise error

    return open_url


@pytest.mark.parametrize(
    ("open_url", "status"),
    [
        (lambda asked, timeout: Answer(), "ok"),
        (refuses(urllib.error.HTTPError("u", 403, "no", {}, None)), "ok"),  # type: ignore[arg-type]
        (refuses(urllib.error.URLError("no route")), "warning"),
        (refuses(TimeoutError("timed out")), "warning"),
    ],
)
def test_the_hub_is_asked_with_a_short_patience(open_url, status, monkeypatch, tmp_path):
    """Any answer will do; none is a warning, because models on disk work without."""
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)

    found = by_name(doctor_checks.hub({"HF_HUB_CACHE": str(tmp_path)}, open_url=open_url))

    assert found["hub"].status == status
    assert doctor_checks.HUB_SECONDS <= 5


def test_a_cache_that_cannot_be_written_is_a_failure(tmp_path):
    """A folder that is not there yet counts as its nearest parent; a file is none."""
    file = tmp_path / "file"
    file.touch()

    assert by_name(doctor_checks.cache_folder(tmp_path / "a" / "b"))["hub cache"].status == "ok"
    assert by_name(doctor_checks.cache_folder(file))["hub cache"].status == "failure"


def test_secrets_in_the_environment_are_not_shown():
    """Variables of this package are listed, those that hold keys without their value."""
    environ = {"MISTRALRS_API_KEY": "s3cret", "CANDLE_NUM_THREADS": "3", "HOME": "/h"}

    (found,) = doctor_checks.variables(environ)

    assert found.detail == "CANDLE_NUM_THREADS=3, MISTRALRS_API_KEY=..."
    assert list(doctor_checks.variables({})) == []


def test_the_rows_of_describe_are_taken_apart():
    """Name, value and origin, however wide the columns are."""
    text = "model          a b   user\nattention  Cpu  automatic, of this\nchat template  none"

    assert self_check.settings_of(text) == {
        "model": ["a b", "user"],
        "attention": ["Cpu", "automatic, of this"],
        "chat template": ["none", ""],
    }


def test_the_self_check_runs_a_model_and_agrees_with_torch(monkeypatch, capsys):
    """A tiny model is built, asked, and described; quantised it is about the same."""
    self_check.main("used")

    found = json.loads(capsys.readouterr().out)
    checks = by_name(doctor_checks.engine(found, {"exact": found["exact"]}))
    assert checks["self-check"].status == "ok"
    assert found["used"] != found["exact"] != found["quantised"]
    assert checks["threads"].detail.split()[0].isdigit()


def test_a_check_that_dies_is_a_result(monkeypatch):
    """A process that ends badly gives its last words, not an exception."""
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    assert doctor._self_check("used") == {"failed": "it ended with status 1"}

    monkeypatch.setattr(doctor.sys, "executable", "/no/such/python")
    assert "/no/such/python" in doctor._self_check("used")["failed"]
