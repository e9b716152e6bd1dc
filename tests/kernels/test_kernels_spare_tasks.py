"""Tasks of kernels: one thread at a time has each."""

from demask.kernels.thread_team import SIZES, SpareTasks


def test_a_task_is_one_threads_until_it_is_put_back() -> None:
    spare = SpareTasks[int, object]()
    first, second = spare.take(1, object), spare.take(1, object)
    assert first is not second
    spare.put(1, first)
    assert spare.take(2, object) is not first
    assert spare.take(1, object) is first
    assert spare.take(1, object) is not first


def test_tasks_of_many_sizes_are_forgotten() -> None:
    spare = SpareTasks[int, object]()
    for key in range(3 * SIZES):
        spare.put(key, spare.take(key, object))
    assert len(spare.tasks) <= SIZES
