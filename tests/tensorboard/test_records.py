"""Checksums and records equal those of tensorboard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow
from tensorboard.summary.writer.record_writer import RecordWriter

from exp.tensorboard.event_file import encode_records, masked_crc32c


@given(st.binary(min_size=4, max_size=100))
def test_checksums_equal_those_of_tensorboard(content):
    assert int.from_bytes(masked_crc32c(content), "little") == pywrap_tensorflow.masked_crc32c(content)


@given(length=st.sampled_from([1023, 1024, 1025, 1027, 1028, 2047, 2049, 3000]), seed=st.integers(0, 255))
def test_checksums_of_several_blocks(length, seed):
    content = bytes((seed + 7 * k) % 256 for k in range(length))
    assert int.from_bytes(masked_crc32c(content), "little") == pywrap_tensorflow.masked_crc32c(content)


@given(st.lists(st.binary(min_size=4, max_size=40), max_size=5))
def test_records_equal_those_of_tensorboard(tmp_path_factory, contents):
    path = tmp_path_factory.mktemp("records") / "theirs"
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for content in contents:
            writer.write(content)
    assert path.read_bytes() == encode_records(contents)
