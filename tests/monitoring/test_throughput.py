import pytest

from millrace.monitoring.files.metrics import Throughput, run_rates


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_startup_and_its_tokens_do_not_count():
    clock = Clock()
    throughput = Throughput(now=clock)
    throughput.report("engine-0", 500)  # the evaluation before the first step
    clock.now_s += 60
    throughput.begin()
    throughput.report("engine-0", 700)
    clock.now_s += 4
    throughput.step(16)
    row = {f"throughput/{name}": value for name, value in throughput.row().items()}
    assert row == {
        "throughput/samples_per_s": 4.0,
        "throughput/tokens_per_s": 50.0,
        "throughput/samples": 16,
        "throughput/tokens": 200,
        "throughput/time_s": 4.0,
    }
    assert run_rates(row) == {"samples_per_s": 4.0, "tokens_per_s": 50.0}
    assert run_rates({"step": 1}) == {}


def test_current_rates_cover_whole_steps_of_at_least_ten_seconds():
    clock = Clock()
    throughput = Throughput(now=clock)
    for seconds, samples in ((4, 100), (4, 8), (4, 8), (4, 8)):
        clock.now_s += seconds
        throughput.step(samples)
    assert throughput.current()["samples_per_s"] == 2.0  # of the last three steps
    clock.now_s += 60
    throughput.step(30)
    assert throughput.current()["samples_per_s"] == 0.5  # of the last step, which is longer
    clock.now_s += 60
    assert throughput.current()["samples_per_s"] == 0.5  # and stays until the next


def test_tokens_of_a_replaced_engine_process_are_kept():
    throughput = Throughput(now=Clock())
    for tokens in (100, 150, 20, 30):
        throughput.report("engine-0", tokens)
    assert throughput.tokens == 180


def test_resumed_run_continues_its_totals():
    clock = Clock()
    earlier = {"throughput/samples": 10, "throughput/tokens": 1000, "throughput/time_s": 5.0}
    throughput = Throughput(earlier=earlier, now=clock)
    clock.now_s += 5
    throughput.report("engine-0", 500)
    throughput.step(20)
    assert throughput.row()["time_s"] == 10.0
    assert (throughput.samples, throughput.tokens) == (30, 1500)
    assert throughput.current()["samples_per_s"] == pytest.approx(4.0)


def test_remaining_time_is_known_after_the_first_step():
    clock = Clock()
    throughput = Throughput(now=clock)
    assert throughput.eta_s(10) is None
    clock.now_s += 2
    throughput.step(1)
    assert throughput.eta_s(9) == 18.0
