"""Paths that no command can use."""


def make_bad_places(folder):
    """Fill ``folder`` with one bad path of each simple kind; returns it."""
    (folder / "empty.txt").touch()
    (folder / "emptydir").mkdir()
    (folder / "zeros.bin").write_bytes(bytes(100))
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text("{}\n")
    return folder
