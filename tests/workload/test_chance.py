import hashlib
import subprocess
import sys

from pensieve.lab.workload.chance import between, exponential, part_of, shuffled, uniform


def test_draws_depend_on_seed_and_names_alone():
    assert uniform(0, "think", "a", 1) == uniform(0, "think", "a", 1)
    assert len({uniform(0, "a"), uniform(1, "a"), uniform(0, "b"), uniform(0, "a", 1)}) == 4


def test_draws_are_the_same_in_another_process():
    code = "from pensieve.lab.workload.chance import uniform; print(repr(uniform(3, 'think', 'bread', 2)))"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert other.stdout.strip() == repr(uniform(3, "think", "bread", 2))


def test_a_part_is_by_the_first_byte_of_the_hash():
    assert part_of("mooncake-0", 2) == 1 + hashlib.sha256(b"mooncake-0").digest()[0] % 2
    halves = [part_of(f"mooncake-{number}", 2) for number in range(2000)]
    assert set(halves) == {1, 2} and 900 < halves.count(1) < 1100


def test_exponential_has_its_mean_and_is_memoryless():
    draws = [exponential(2.0, 0, index) for index in range(20_000)]
    assert abs(sum(draws) / len(draws) - 2.0) < 0.05
    assert abs(sum(draw > 2.0 for draw in draws) / len(draws) - 0.3679) < 0.01
    assert exponential(0.0, 0, "x") == 0.0


def test_between_reaches_both_ends_and_nothing_else():
    assert {between(2, 4, 0, index) for index in range(200)} == {2, 3, 4}


def test_shuffled_is_a_permutation_that_the_seed_changes():
    assert sorted(shuffled(12, 0, "x")) == list(range(12))
    assert shuffled(12, 0, "x") != shuffled(12, 1, "x")
