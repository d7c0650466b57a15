"""Guards what a run's record says of its source, where git says nothing: a container, a copied folder."""

from lingpt.train import environment


def test_the_source_s_hash_is_of_the_code_alone(tmp_path, monkeypatch):
    files = {"train/__init__.py": "", "train/loop.py": "a = 1", "tests/__init__.py": "", "runs/log.py": "x"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    first = environment.package_hash()
    for name in ("tests/__init__.py", "runs/log.py"):
        (tmp_path / name).write_text("changed")
        assert environment.package_hash() == first
    (tmp_path / "train" / "loop.py").write_text("a = 2")
    assert environment.package_hash() != first
