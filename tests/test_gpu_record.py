"""The record of the GPU tests: what counts as stale, how it is written, and whether the repository's is."""

import json
from pathlib import Path

import pytest

import lingpt.train  # noqa: F401 (pytester drops what it imports, and operators register once)
from lingpt.cli.kernels import RECORD, staleness
from lingpt.cli.main import main

pytest_plugins = ["pytester"]

TREE = Path(__file__).parents[1]


def test_the_repositorys_record_is_of_this_source() -> None:
    """Guards: kernels changed after their last run on a GPU are seen in every CI run, as a skip."""
    if reason := staleness(TREE / RECORD):
        pytest.skip(reason)


def write(path: Path, **fields: object) -> Path:
    path.write_text(json.dumps({"source_hash": "abc", "passed": 3, "failed": 0, "skipped": 1} | fields))
    return path


def test_what_is_stale(tmp_path: Path) -> None:
    """Guards: only a record of this source, of all tests, with some passed and none failed, speaks for it."""
    path = tmp_path / "gpu-tests.json"
    assert f"no GPU record at {path}: " in staleness(path, "abc")
    assert staleness(write(path), "abc") is None
    assert staleness(write(path), "abd").startswith("stale GPU record (kernels abc, the tree has abd)")
    assert "1 failed" in staleness(write(path, failed=1), "abc")
    assert "0 tests passed" in staleness(write(path, passed=0), "abc")
    for some in ("forward", "not fla"):
        assert f"some tests alone (-k '{some}')" in staleness(write(path, selected=some), "abc")
    for text in ("{", "[]", '{"source_hash": "abc", "passed": 1}'):
        path.write_text(text)
        assert f"unreadable GPU record {path}: " in staleness(path, "abc")
    assert f"unreadable GPU record {tmp_path}: " in staleness(tmp_path, "abc")  # a folder


def test_release_check_fails_on_a_stale_record(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Guards: `make release-check` exits 1 for a stale or missing record, 0 for a good one."""
    from lingpt.kernels.linear_attention.cuda.source_hash import source_hash

    path = tmp_path / "gpu-tests.json"
    for fields, code in (({"source_hash": "old"}, 1), ({"source_hash": source_hash()}, 0)):
        write(path, **fields)
        if code:
            with pytest.raises(SystemExit) as stopped:
                main(["kernels", "release-check", "--record", str(path)])
            assert stopped.value.code == code
        else:
            assert main(["kernels", "release-check", "--record", str(path)]) == code
    assert "stale GPU record" in capsys.readouterr().err


SUITE = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("i", range(3))
def test_passes(i): pass

@pytest.mark.gpu
def test_fails(): assert FAIL == 0

@pytest.mark.gpu
def test_skips(): pytest.skip("no")

@pytest.fixture
def broken():
    yield
    assert FAIL == 0

@pytest.mark.gpu
def test_breaks_in_teardown(broken): pass

def test_of_the_cpu(): pass
"""


def run(pytester: pytest.Pytester, suite: str, *options: str) -> pytest.RunResult:
    pytester.makeini("[pytest]\nmarkers =\n    gpu: x\n")
    pytester.makepyfile(suite)
    plugin = ("-p", "lingpt.tests.gpu_record", "--gpu-record", "out/record.json")
    return pytester.runpytest_inprocess(*plugin, *options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
@pytest.mark.parametrize("fail, counts", [(0, (5, 0, 1)), (1, (3, 2, 1))])
def test_the_plugin_counts_gpu_tests(
    pytester: pytest.Pytester, fail: int, counts: tuple, options: tuple[str, ...]
) -> None:
    """Guards: the counts are of tests marked gpu alone, a failure in teardown is one, with xdist too."""
    if options and not fail:
        pytest.skip("the same as with failures; starting a worker takes seconds")
    result = run(pytester, f"FAIL = {fail}\n{SUITE}", *options)
    assert result.ret == (1 if fail else 0)
    path = pytester.path / "out" / "record.json"
    record = json.loads(path.read_text())
    assert (record["passed"], record["failed"], record["skipped"]) == counts
    assert {"card", "driver", "versions", "date", "source_hash"} <= set(record)
    assert (staleness(path) is None) == (fail == 0)


def test_the_plugin_leaves_a_record_alone_when_nothing_ran(pytester: pytest.Pytester) -> None:
    """Guards: a run where every GPU test is skipped does not overwrite what a GPU machine wrote."""
    (pytester.path / "out").mkdir()
    write(pytester.path / "out" / "record.json")
    run(pytester, "import pytest\n@pytest.mark.gpu\n@pytest.mark.skip\ndef test_a(): pass\n")
    assert json.loads((pytester.path / "out" / "record.json").read_text())["source_hash"] == "abc"
