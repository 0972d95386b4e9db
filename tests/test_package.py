"""The root package: what importing it costs, and the shape of the tree that it lies in."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import tensorlease

from .check_tree import MAX_LINES, bare_packages, links, long_modules, unchecked_pure_modules
from .check_tree import main as check_tree


def run_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_neither_torch_nor_zmq() -> None:
    loaded = run_python(
        "import sys, tensorlease as tl; tl.__version__; dir(tl)\n"
        "print(*(n for n in ('torch', 'zmq', 'click', 'msgspec') if n in sys.modules))"
    )
    assert loaded.split() == []


def test_importing_the_command_line_imports_neither_torch_nor_zmq_nor_click() -> None:
    loaded = run_python(
        "import sys, tensorlease.cli\n"
        "print(*(n for n in ('torch', 'zmq', 'click', 'rich') if n in sys.modules))"
    )
    assert loaded.split() == []


def test_broker_and_protocol_load_without_torch() -> None:
    loaded = run_python(
        "import sys, tensorlease.broker, tensorlease.protocol; print('torch' in sys.modules)"
    )
    assert loaded.strip() == "False"


def test_the_agents_are_loaded_at_their_first_use() -> None:
    names = run_python(
        "import sys, tensorlease as tl\n"
        "before = 'tensorlease.agents' in sys.modules\n"
        "print(before, tl.TrainerAgent.__name__, tl.WorkerAgent.__name__, 'TrainerAgent' in vars(tl))"
    )
    assert names.split() == ["False", "TrainerAgent", "WorkerAgent", "True"]


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert tensorlease.__version__ == importlib.metadata.version("tensorlease")


def test_dir_names_every_public_name() -> None:
    assert set(tensorlease.__all__) <= set(dir(tensorlease))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'tensorlease' has no attribute 'TrainerAgnt'"):
        _ = tensorlease.TrainerAgnt


def test_no_layer_is_imported_under_its_bare_name(tmp_path: Path) -> None:
    for layer in ("broker", "protocol", "agents"):
        (tmp_path / layer).mkdir()
        (tmp_path / layer / "__init__.py").touch()
    assert list(bare_packages(tmp_path)) == []


def test_the_tree_check_names_a_module_that_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    (tmp_path / "broker" / "fits.py").write_text("x = 1\n" * MAX_LINES)
    (tmp_path / "broker" / "long.py").write_text("x = 1\n" * (MAX_LINES + 1))
    assert list(long_modules(tmp_path)) == ["broker/long.py: 601 lines, and 600 are the limit"]


def test_the_tree_check_counts_a_linked_layer_once(tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    (tmp_path / "broker" / "long.py").write_text("x = 1\n" * (MAX_LINES + 1))
    (tmp_path / "src" / "tensorlease").mkdir(parents=True)
    (tmp_path / "src" / "tensorlease" / "broker").symlink_to("../../broker")
    assert len(list(long_modules(tmp_path))) == 1


def test_the_tree_check_names_a_layer_that_is_a_copy(tmp_path: Path) -> None:
    source = tmp_path / "src" / "tensorlease"
    source.mkdir(parents=True)
    for layer in ("broker", "protocol", "agents"):
        (tmp_path / layer).mkdir()
    (source / "broker").symlink_to("../../broker")
    (source / "protocol").symlink_to("../../agents")
    (source / "agents").mkdir()
    assert [line.split(":")[0] for line in links(tmp_path)] == [
        "src/tensorlease/protocol",
        "src/tensorlease/agents",
    ]


def write_contract(root: Path, *modules: str) -> None:
    names = ", ".join(f'"{module}"' for module in modules)
    (root / "pyproject.toml").write_text(
        f"[[tool.importlinter.contracts]]\nname = 'pure'\nsource_modules = [{names}]\n"
    )


def test_the_tree_check_names_a_pure_module_that_no_contract_checks(tmp_path: Path) -> None:
    write_contract(tmp_path, "tensorlease.protocol")
    (tmp_path / "protocol").mkdir()
    (tmp_path / "protocol" / "__init__.py").touch()
    assert list(unchecked_pure_modules(tmp_path)) == []
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "worker_core.py").touch()
    (found,) = unchecked_pure_modules(tmp_path)
    assert "tensorlease.agents.worker_core" in found


def test_the_tree_check_fails_on_an_empty_tree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_contract(tmp_path)
    assert check_tree(tmp_path) == 1
    assert "no module found" in capsys.readouterr().out
