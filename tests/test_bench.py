"""`mistralrs-sdk bench`: the runs, the flags, and the same work over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

import attrs
import pytest

from mistralrs_sdk import InferenceError
from mistralrs_sdk.cli import main
from mistralrs_sdk.cli.bench_http import Address, HttpClient
from mistralrs_sdk.cli.bench_numbers import Answer
from mistralrs_sdk.cli.bench_runs import run_load, run_single
from mistralrs_sdk.cli.bench_targets import InProcess, OverHttp
from mistralrs_sdk.cli.bench_work import Job, Load, TokenIds, make_jobs
from tests.model_helpers import tiny_builder, tiny_folder

TINY = ("--cpu", "--num-threads", "1", "--dtype", "f32")


@pytest.fixture(scope="module", autouse=True)
def _checkpoint():
    """Made before a test looks at what is printed: saving it shows a bar."""
    tiny_folder()


@attrs.define
class FakeTarget:
    """Answers at once; notes how many requests run together."""

    name: str = "fake"
    ids: TokenIds = attrs.field(factory=TokenIds)
    jobs: list = attrs.field(factory=list)
    running: int = 0
    most: int = 0
    error: str | None = None
    brings: int | None = None

    async def answer(self, job):
        self.jobs.append(job)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        count = job.new_tokens if self.brings is None else self.brings
        times = tuple(float(i) for i in range(1, count + 1))
        return Answer(sent=0.0, times=times, new_tokens=count, error=self.error)


async def test_single_cases_run_one_after_the_other():
    """Warm-ups come first and do not count; no prompt is sent twice."""
    target = FakeTarget()
    ticks = []

    found = await run_single(
        target, [(8, 1), (4, 3)], iterations=2, warmup=1, tick=lambda: ticks.append(1)
    )

    assert [result.test for result in found] == ["TTFT (8 input tokens)", "Decode (3 tokens @ d4)"]
    assert [(len(job.prompt), job.new_tokens) for job in target.jobs] == [(8, 1)] * 3 + [(4, 3)] * 3
    assert len({job.prompt for job in target.jobs}) == len(ticks) == 6
    assert target.most == 1


@pytest.mark.parametrize(("error", "brings"), [("HTTP 500: no", None), (None, 0), (None, 1)])
async def test_single_runs_need_whole_answers(error, brings):
    """A failure, or an answer that ended early, is an error and no number."""
    with pytest.raises(InferenceError):
        await run_single(FakeTarget(error=error, brings=brings), [(4, 3)], iterations=1, warmup=0)


async def test_clients_of_a_closed_loop_wait_for_their_answers():
    """So many run at once and no more; each job is sent once, after the shortened warm-ups."""
    target = FakeTarget()
    jobs = make_jobs([(5, 20)] * 10, target.ids, seed=0)

    found = await run_load(target, Load(concurrency=3), jobs, warmup=jobs[:2])

    assert target.most == 3
    assert [job.new_tokens for job in target.jobs[:2]] == [8, 8]
    assert sorted(target.jobs[2:], key=str) == sorted(jobs, key=str)
    assert (found.requests, found.output_tokens) == (10, 200)


async def test_requests_at_a_rate_do_not_wait():
    """Each is sent at its moment, however many are running."""
    target = FakeTarget()
    jobs = make_jobs([(5, 2)] * 6, target.ids, seed=0)

    found = await run_load(target, Load(request_rate=1e6), jobs)

    assert target.jobs == jobs
    assert found.load == "1e+06 a second"


async def test_a_model_in_process_answers_to_the_length():
    """Ids come from its vocabulary, end tokens do not end it, and what comes has its time."""
    async with await tiny_builder().build() as model:
        target = await InProcess.of(model, name="tiny")
        answer = await target.answer(Job(prompt=tuple(range(200, 220)), new_tokens=12))
        failed = await target.answer(Job(prompt=tuple(range(200, 220)), new_tokens=0))

    assert target.ids == TokenIds(170, 342)
    assert (answer.prompt_tokens, answer.new_tokens) == (20, 12)
    assert 1 <= len(answer.times) <= 12  # what a slow reader has not taken comes together
    assert sorted(answer.times) == list(answer.times)
    assert answer.sent < answer.times[0]
    assert failed.error
    assert "max_len" in failed.error


def test_bench_prints_mistral_rs_table(capsys):
    """A row for each case, rate with deviation, and latency."""
    flags = "--prompt-len 16,8 --depth 2 --gen-len 6 --iterations 2"

    code = main(["bench", "-m", str(tiny_folder()), *TINY, *flags.split()])

    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert "2 iterations" in out
    for row in ("TTFT (16 input tokens)", "TTFT (8 input tokens)", "Decode (6 tokens @ d2)"):
        assert row in out
    assert "±" in out
    assert "ms TPOT" in out


def test_bench_of_loads_as_json(capsys):
    """One entry for each load, with counts and percentiles; the shared prefix is cached."""
    flags = "--concurrency 1,3 --requests 6 --prompt-len 20 --gen-len 5 --shared-prefix 64 --json"

    assert main(["bench", "-m", str(tiny_folder()), *TINY, *flags.split()]) == 0

    loads = json.loads(capsys.readouterr().out)["loads"]
    assert [load["concurrency"] for load in loads] == [1, 3]
    for load in loads:
        assert (load["requests"], load["failed"], load["output_tokens"]) == (6, 0, 30)
        assert load["prompt_tokens"] == 6 * 84
        assert load["cached_tokens"] >= 3 * 64
        assert 0 < load["ttft_ms"]["p50"] <= load["ttft_ms"]["p95"] <= load["ttft_ms"]["p99"]


def test_bench_draws_a_plot(tmp_path, capsys):
    """--plot writes a picture beside the table."""
    pytest.importorskip("matplotlib")
    file = tmp_path / "loads.png"
    flags = f"--request-rate 500 --requests 3 --prompt-len 4 --gen-len 3 --plot {file}"

    assert main(["bench", "-m", str(tiny_folder()), *TINY, *flags.split()]) == 0

    assert file.read_bytes().startswith(b"\x89PNG")
    assert "output T/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--concurrency 2 --iterations 3", "--iterations"),
        ("--concurrency 2 --depth 3", "--depth"),
        ("--requests 3", "--requests"),
        ("--plot a.png", "--plot"),
        ("--dataset mix --prompt-len 3", "--prompt-len"),
        ("--prompt-len 0 --gen-len 1", "nothing to measure"),
        ("--concurrency 2 --prompt-len 0", "--prompt-len"),
        ("--iterations 0", "--iterations"),
        ("--warmup -1", "--warmup"),
        ("--prompt-len 600", "longer than the model takes (512)"),
        ("--concurrency 2 --prompt-len 300 --shared-prefix 300", "longer than the model"),
        ("--adapter none", "--adapter"),
        ("--http-api chat", "--http-api"),
        ("--no-ignore-eos", "--ignore-eos"),
        ("--http ftp://x", "must be like http://"),
        ("--http http://127.0.0.1:1 --max-seqs 3", "max_seqs"),
        ("--http http://127.0.0.1:1 --adapter x", "--adapter"),
        ("--http http://127.0.0.1:1 --api-key-env NO_SUCH_KEY", "NO_SUCH_KEY"),
        ("--http http://127.0.0.1:1", "cannot be reached"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(flags, named, capsys):
    """An error names the flag, whatever is wrong with it."""
    base = [] if "--http " in flags else TINY

    assert main(["bench", "-m", str(tiny_folder()), *base, *flags.split()]) == 1

    assert named in capsys.readouterr().err


def test_a_list_of_nothing_is_a_usage_error(capsys):
    """Lists take whole numbers: exit code 2."""
    for flags in (["--concurrency", "1,0"], ["--request-rate", "-1"], ["--depth", "x"]):
        with pytest.raises(SystemExit) as left:
            main(["bench", "-m", "x", *flags])
        assert left.value.code == 2
    assert "must be at least 1" in capsys.readouterr().err


class Server:
    """Answers every request on a loopback port with the bytes given, and notes what it was sent."""

    def __init__(self, *replies: bytes, closes: bool = False) -> None:
        self.replies = list(replies)
        self.closes = closes
        self.heads: list[bytes] = []
        self.bodies: list[dict] = []
        self.connections = 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc):
        self.server.close()
        await self.server.wait_closed()

    def target(self, *, api="completions", ignore_eos=True, headers=None):
        self.client = HttpClient(
            Address.parse(f"http://127.0.0.1:{self.port}/v1/"), headers=headers
        )
        return OverHttp(self.client, name="m", ids=TokenIds(), api=api, ignore_eos=ignore_eos)

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            while self.replies:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                self.heads.append(head)
                writer.write(self.replies.pop(0))
                await writer.drain()
                if self.closes:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


def chunked(*events: str) -> bytes:
    """Server-sent events, each in a chunk of its own but the last, which is cut in two."""
    body = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [f"data: {event}\n\n".encode() for event in events]
    pieces[-1:] = [pieces[-1][:9], pieces[-1][9:]]
    for piece in pieces:
        body += f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
    return body + b"0\r\n\r\n"


TEXT = '{"choices": [{"text": "a"}]}'
USAGE = (
    '{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, '
    '"prompt_tokens_details": {"cached_tokens": 5}}}'
)


async def test_completions_over_http_send_the_ids():
    """The prompt is the ids; pieces are timed, the usage alone is none; connections are kept."""
    job = Job(prompt=(5, 6, 7), new_tokens=2)
    reply = chunked(TEXT, '{"choices": [{"text": "", "finish_reason": null}]}', USAGE, "[DONE]")
    async with Server(reply, reply) as server:
        target = server.target(headers={"Authorization": "Bearer k"})
        answers = [await target.answer(job), await target.answer(job)]
        await server.client.aclose()

    assert [answer.error for answer in answers] == [None, None]
    assert (len(answers[0].times), answers[0].prompt_tokens, answers[0].new_tokens) == (2, 7, 2)
    assert answers[0].cached_tokens == 5
    assert server.connections == 1
    assert server.heads[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer k\r\n" in server.heads[0]
    assert server.bodies[0] == {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


async def test_chats_over_http_send_a_word_for_each_id():
    """The role that opens a chat and the end alone are no pieces; ignore_eos can be left out."""
    reply = chunked(
        '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        '{"choices": [{"delta": {"content": "a"}}]}',
        '{"choices": [{"delta": {"reasoning_content": "b"}}]}',
        '{"choices": [{"delta": {}, "finish_reason": "length"}]}',
        "[DONE]",
    )
    async with Server(reply) as server:
        target = server.target(api="chat", ignore_eos=False)
        answer = await target.answer(Job(prompt=(5, 6, 7), new_tokens=2))
        await server.client.aclose()

    assert (answer.error, len(answer.times), answer.new_tokens) == (None, 2, 2)
    (message,) = server.bodies[0]["messages"]
    assert len(message["content"].split()) == 3
    assert "ignore_eos" not in server.bodies[0]


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (
            b'HTTP/1.1 429 Busy\r\nContent-Length: 35\r\n\r\n{"error": {"message": "try later"}}',
            "HTTP 429: try later",
        ),
        (chunked(TEXT, '{"error": {"message": "it broke"}}'), "it broke"),
        (chunked(TEXT, "{no json"), "no JSON"),
        (chunked(TEXT, TEXT)[:-20], "broke off"),
        (b"SMTP\r\n", "no HTTP server"),
        (b"", "closed the connection"),
    ],
)
async def test_what_goes_wrong_over_http_is_in_the_answer(reply, says):
    """A refusal, an error in mid-stream, nonsense and a cut stream fail that request alone."""
    async with Server(reply, closes=True) as server:
        answer = await server.target().answer(Job(prompt=(1,), new_tokens=2))
        await server.client.aclose()

    assert answer.error is not None
    assert says in answer.error


async def test_a_kept_connection_that_was_closed_is_opened_again():
    """The next request goes over a fresh one, unseen."""
    reply = chunked(TEXT, "[DONE]")
    async with Server(reply, reply, closes=True) as server:
        target = server.target()
        answers = [await target.answer(Job(prompt=(1,), new_tokens=1)) for _ in range(2)]
        await server.client.aclose()

    assert [answer.error for answer in answers] == [None, None]
    assert server.connections == 2


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h", ("h", 80, False, "")),
        ("https://h/v1", ("h", 443, True, "")),
        ("http://[::1]:8/a/v1/", ("::1", 8, False, "/a")),
    ],
)
def test_urls_are_taken_apart(url, address):
    """The port comes from the scheme unless it is given; /v1 may be there or not."""
    assert attrs.astuple(Address.parse(url)) == address


@contextlib.contextmanager
def in_a_thread(*replies: bytes) -> Iterator[Server]:
    """A server for commands, which have an event loop of their own."""
    started, stop = threading.Event(), threading.Event()
    server = Server(*replies, closes=True)

    async def serve():
        async with server:
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(10)
        yield server
    finally:
        stop.set()
        thread.join()


def test_failed_requests_are_told_and_end_with_1(capsys):
    """The table is there all the same, and stderr says what failed how often."""
    refused = b"HTTP/1.1 400 No\r\nContent-Length: 20\r\n\r\n" + b'{"detail": "no ids"}'
    flags = "--concurrency 1 --requests 3 --warmup 0 --prompt-len 2 --gen-len 2"

    with in_a_thread(*[refused] * 3) as server:
        where = ["--http", f"http://127.0.0.1:{server.port}"]
        code = main(["bench", "-m", "x", *where, *flags.split()])

    out, err = capsys.readouterr()
    assert code == 1
    assert "failed" in out
    assert err == "1 at once: 3 failed: HTTP 400: no ids\n"


def test_a_server_gets_other_prompts_each_time(capsys):
    """It may remember the last ones; with --traffic-seed they are the same."""
    reply = chunked(TEXT, TEXT, USAGE, "[DONE]")
    flags = "--concurrency 1 --requests 1 --warmup 0 --prompt-len 9 --gen-len 2"

    with in_a_thread(*[reply] * 4) as server:
        where = ["--http", f"http://127.0.0.1:{server.port}"]
        for seed in ([], [], ["--traffic-seed", "1"], ["--traffic-seed", "1"]):
            assert main(["bench", "-m", "x", *where, *flags.split(), *seed]) == 0

    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts[:3])) == 3
    assert prompts[2] == prompts[3]
