"""Which texts are taken and held out: the standard library, one file, a folder, and text that is none."""

import os

import pytest

from dstrain.config.errors import InputError
from dstrain.data.sources import heldout_cut, open_source, stable_hash, walk_files


@pytest.fixture(scope="module")
def stdlib():
    return open_source(None, "*")


def top(part):
    return part.name.split("/")[0].removesuffix(".py")


def test_the_standard_library_is_split_by_whole_modules(stdlib):
    train, heldout = {top(p) for p in stdlib.train}, {top(p) for p in stdlib.heldout}
    assert len(train) > 80 and len(heldout) > 5 and not train & heldout
    assert 300_000 <= sum(p.end - p.start for p in stdlib.heldout) <= 600_000
    assert sum(p.end - p.start for p in stdlib.train) > 5_000_000


def test_tables_tests_and_installed_packages_are_no_part_of_it(stdlib):
    parts = {folder for p in stdlib.train + stdlib.heldout for folder in p.name.split("/")}
    assert not parts & {"site-packages", "test", "tests", "idlelib", "encodings", "lib2to3", "pydoc_data"}
    assert all(p.name.endswith(".py") and "_sysconfigdata" not in p.name for p in stdlib.train + stdlib.heldout)


def test_the_split_is_the_same_every_time(stdlib):
    again = open_source(None, "*")
    assert again == stdlib


def test_a_file_keeps_its_last_five_percent_cut_at_a_line_end(tmp_path):
    lines = [f"line {i} é" for i in range(1000)]
    data = "\n".join(lines).encode()
    path = tmp_path / "book.txt"
    path.write_bytes(data)
    source = open_source(str(path), "*")
    (train,), (heldout,) = source.train, source.heldout
    assert train.read() + heldout.read() == data.decode() and train.read().endswith("\n")
    assert abs(len(heldout.read_bytes()) / len(data) - 0.05) < 0.002
    assert source.name == "book"


@pytest.mark.parametrize(
    "data, cut",
    [
        (b"a\nb", 2),  # the only line end
        (b"a\nb\n", 2),  # the last line end has nothing after it
        (b"x" * 100 + b"\ny", 101),
        (b"x\n" + b"y" * 100, 2),
        (b"x" * 96 + b"\n" + b"y" * 3, 97),  # nearer after 95 % than before
        (b"x" * 100, 95),  # one line: at a character
        (b"x" + "é".encode() * 50, 95),  # odd bytes are first bytes
        ("é".encode() * 50, 94),  # odd bytes are second bytes
        (b"ab", 1),
        (b"ab\n\n", 1),  # what is held out is no white space
    ],
)
def test_where_a_file_is_cut(data, cut):
    assert heldout_cut(data) == cut
    data[:cut].decode(), data[cut:].decode()


def test_line_ends_are_kept_as_they_are(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\nfour")
    source = open_source(str(tmp_path / "a.txt"), "*")
    assert source.train[0].read_bytes() + source.heldout[0].read_bytes() == b"one\r\ntwo\rthree\nfour"
    assert source.train[0].read() == "one\r\ntwo\rthree\n"


def fill(folder, names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n")
    return folder


def test_a_folder_is_searched_below_without_hidden_files_and_in_order(tmp_path):
    fill(tmp_path, ["b.txt", "a/z.txt", "a/.hidden.txt", ".git/config.txt", "a.md", "c/d/e.txt"])
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")
    assert [p.as_posix() for p in walk_files(tmp_path)] == ["a/z.txt", "a.md", "b.txt", "c/d/e.txt"]
    source = open_source(str(tmp_path), "*.txt")
    names = sorted(p.name for p in source.train + source.heldout)
    assert names == ["a/z.txt", "b.txt", "c/d/e.txt"]
    assert len(source.heldout) >= 1 and len(source.train) >= 1
    assert open_source(str(tmp_path), "c/d/*").train[0].name == "e.txt"  # one file: cut like a file


def test_about_five_percent_of_a_folders_files_are_held_out_and_new_files_move_none(tmp_path):
    fill(tmp_path, [f"f{i}.txt" for i in range(600)])
    before = open_source(str(tmp_path), "*")
    assert 15 <= len(before.heldout) <= 50  # 30 expected of 600
    fill(tmp_path, [f"g{i}.txt" for i in range(200)])
    after = open_source(str(tmp_path), "*")
    assert {p.name for p in before.heldout} == {p.name for p in after.heldout if p.name.startswith("f")}
    assert before.digest != after.digest


@pytest.mark.parametrize("names", [["a", "b"], ["c", "d", "e"], ["x1", "x2", "x3", "x4"]])
def test_small_folders_have_both_sides(tmp_path, names):
    source = open_source(str(fill(tmp_path, names)), "*")
    assert source.train and source.heldout and len(source.train) + len(source.heldout) == len(names)


def test_a_folder_of_few_files_trains_on_most_of_its_text(tmp_path):
    """Three files whose hashes all fall on the held-out side: the smallest is held out, whatever the hash of the large one."""
    names = [f"n{i}" for i in range(200) if stable_hash(f"n{i}") < 0.05 * 2**64][:3]
    root = fill(tmp_path, names)
    (root / names[1]).write_text("x")
    source = open_source(str(root), "*")
    assert len(names) == 3 and [part.name for part in source.heldout] == [names[1]] and len(source.train) == 2


def test_the_digest_changes_with_content_and_names_but_not_with_the_place(tmp_path):
    def digest(name, files):
        return open_source(str(fill(tmp_path / name / "same", files)), "*").digest

    first = digest("1", ["a", "b", "c"])
    assert first == digest("2", ["a", "b", "c"]) != digest("3", ["a", "b", "d"])
    (tmp_path / "1/same/b").write_text("text of B\n")  # the same size
    assert open_source(str(tmp_path / "1/same"), "*").digest != first


def test_unusable_files_of_a_folder_are_left_out_and_named(tmp_path):
    fill(tmp_path, ["a.txt", "b.txt"])
    (tmp_path / "image").write_bytes(b"ok\xff\xfe")
    (tmp_path / "nothing").write_bytes(b"")
    (tmp_path / "blank").write_bytes(b" \n\n")
    source = open_source(str(tmp_path), "*")
    assert sorted(p.name for p in source.train + source.heldout) == ["a.txt", "b.txt"]
    assert source.skipped == ["blank: empty", "image: not UTF-8: byte 0xff at offset 2", "nothing: empty"]


def test_text_that_cannot_be_used_is_an_input_error_that_names_it(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9 au lait\n".encode("latin-1"))
    (tmp_path / "short.txt").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary/a").write_bytes(b"\xff")
    cases = {
        "empty.txt": "empty",
        "latin.txt": "not UTF-8: byte 0xe9 at offset 3",
        "short.txt": "too little",
        "folder": "no file matches",
        "binary": "none of 1",
        "missing": "no such file or folder",
    }
    for name, words in cases.items():
        with pytest.raises(InputError) as error:
            open_source(str(tmp_path / name), "*")
        assert words in str(error.value) and name in str(error.value) and "\n" not in str(error.value)
    fill(tmp_path / "folder", ["a.txt"])
    for pattern, words in (("*.md", "'\\*.md'"), ("", "empty"), (".", "names no files")):
        with pytest.raises(InputError, match=words):
            open_source(str(tmp_path / "folder"), pattern)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="neither a file nor a folder"):
        open_source(str(tmp_path / "pipe"), "*")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(tmp_path):
    path = tmp_path / "secret.txt"
    path.write_text("a\nb\n")
    path.chmod(0)
    with pytest.raises(InputError, match="secret.txt.*ermission"):
        open_source(str(path), "*")
