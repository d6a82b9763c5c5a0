"""JSON documents with a checksum of themselves: damage to one never passes for what was written."""

import json

import pytest

from batchinfer.checked_json import publish_json, read_json
from batchinfer.records import DamagedFileError


def test_a_json_file_that_was_changed_is_refused(tmp_path):
    path = tmp_path / "file.json"
    publish_json(path, {"num_rows": 10})
    assert read_json(path) == {"num_rows": 10}
    path.write_text(path.read_text().replace("10", "11"))
    with pytest.raises(DamagedFileError, match="its checksum does not match its content"):
        read_json(path)


def test_no_flipped_bit_in_a_json_file_changes_what_it_says(tmp_path):
    """Not one in the name of the checksum, either: documents of earlier versions have none, and are believed."""
    path, said = tmp_path / "goal.json", {"most_tasks": 3, "where": {"ünit": [1.5, None]}}
    publish_json(path, said)
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert read_json(path) == said
        except DamagedFileError:
            continue
    path.write_text(json.dumps(said))
    assert read_json(path) == said
    path.write_text("{}")
    assert read_json(path) == {}
