"""`tokendrop bench images` gives what its README tells of."""

import json

from tokendrop.cli.main import main


def test_it_measures_reading_beside_torchvisions_transforms(capsys):
    main(["bench", "images", "--rounds", "2", "--images", "64", "--json"])
    figures = {name: one["median"] for name, one in json.loads(capsys.readouterr().out)["figures"].items()}
    per_size = {f"{kind}_{size}" for kind in ("images_per_s", "over_torchvision") for size in (32, 224)}
    assert figures.keys() == {*per_size, "wait_fraction"}
    assert all(figures[name] > 0 for name in per_size)
    assert 0 <= figures["wait_fraction"] < 1
