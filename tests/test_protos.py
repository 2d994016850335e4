"""The generated modules are what protos/ gives, byte for byte; `make protos` brings them in line."""

from pathlib import Path

from scripts import generate_protos

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "gpumap" / "agent" / "_proto"


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_the_generated_modules_are_up_to_date(tmp_path: Path) -> None:
    """Generating again changes no file, adds none and leaves none over; if it does, run `make protos`."""
    generate_protos.generate(tmp_path)
    assert files(tmp_path / "gpumap" / "agent" / "_proto") == files(PACKAGE), "run `make protos`"
