"""Text, tokens and rows: what parts documents, what a row holds, and that a step's rows can be had again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashtile.train import Tokenizer, read_corpus
from flashtile.train.data import derived_seed, documents_of

TEXT = "One.\n\nStill one.\n\n\nTwo, naïve.\r\n\r\n \t\r\n\r\n\r\nThree.\n\n\n"
CONTEXT = 32


@pytest.fixture(scope="module")
def corpus():
    return read_corpus([], CONTEXT)


def test_two_blank_lines_part_documents():
    assert documents_of(TEXT) == ["One.\n\nStill one.\n", "Two, naïve.\n", "Three.\n"]
    assert documents_of("\n\n\n \n") == []


@pytest.mark.parametrize("tokenizer", [Tokenizer(), Tokenizer.learn(documents_of(TEXT) * 3, 300)])
def test_every_document_begins_with_start_and_comes_back(tokenizer):
    documents = documents_of(TEXT)
    stream = tokenizer.stream(documents)
    assert stream.dtype == torch.int32
    assert int(stream.max()) == tokenizer.start == tokenizer.vocabulary - 1
    assert (stream == tokenizer.start).sum() == len(documents)
    assert tokenizer.decode(stream) == "".join(documents)
    ids = tokenizer.document_ids(stream[None])
    for number, text in enumerate(documents, 1):
        assert tokenizer.decode(stream[ids[0] == number]) == text
    again = Tokenizer(tokenizer.pairs)
    assert torch.equal(again.stream(documents), stream)


def test_byte_pairs_are_fewer_than_bytes():
    pairs = Tokenizer.learn(documents_of(TEXT) * 3, 300)
    assert 256 < pairs.vocabulary <= 300
    assert len(pairs.encode("Still one.")) < len(Tokenizer().encode("Still one.")) == 10
    assert pairs.decode(torch.tensor(pairs.encode("unseen: €"))) == "unseen: €"
    with pytest.raises(ValueError, match=r"vocabulary must be at least 258.*, got 257"):
        Tokenizer.learn([TEXT], 257)


def test_rows_of_a_step_are_parts_of_the_text_and_depend_on_step_and_seed_alone(corpus):
    rows = corpus.rows(3, 5, CONTEXT + 1, seed=7)
    torch.rand(10)
    assert torch.equal(rows, corpus.rows(3, 5, CONTEXT + 1, seed=7))
    assert not torch.equal(rows, corpus.rows(4, 5, CONTEXT + 1, seed=7))
    assert not torch.equal(rows, corpus.rows(3, 5, CONTEXT + 1, seed=8))
    windows = corpus.training.unfold(0, CONTEXT + 1, 1)
    for row in rows:
        assert (windows == row).all(1).any()


def test_the_last_rows_are_drawn_too(corpus):
    whole = len(corpus.training)
    assert torch.equal(corpus.rows(0, 2, whole, seed=0), corpus.training.long().expand(2, -1))


def test_every_held_out_token_is_predicted_once(corpus):
    rows = corpus.held_out_rows(CONTEXT + 1, 10**9)
    predicted = rows[:, 1:].flatten()
    assert torch.equal(predicted, corpus.validation[1 : 1 + len(predicted)].long())
    assert len(corpus.validation) - 1 - len(predicted) < CONTEXT
    assert torch.equal(corpus.held_out_rows(CONTEXT + 1, 3), rows[:3])


def test_the_end_of_every_file_is_held_out(tmp_path: Path):
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in files:
        path.write_text("".join(f"{path.stem} line {i:03}\n" for i in range(100)))
    corpus = read_corpus(files, CONTEXT)
    learned, held_out = (corpus.tokenizer.decode(part) for part in (corpus.training, corpus.validation))
    for path in files:
        assert f"{path.stem} line 000\n" in learned
        assert f"{path.stem} line 099\n" in held_out
        assert f"{path.stem} line 099\n" not in learned
    assert learned.count("\n") + held_out.count("\n") == 200
    assert corpus.digest != read_corpus(files[:1], CONTEXT).digest


def test_texts_that_cannot_be_used_are_refused(tmp_path: Path):
    short = tmp_path / "short.txt"
    short.write_text("A line.\n" * 20)
    with pytest.raises(ValueError, match=r"shorter than the text.*: 145 and 17 tokens, got a context of 32"):
        read_corpus([short], CONTEXT)
    with pytest.raises(ValueError, match=r"text must be files of UTF-8 text, got '.*absent.txt'"):
        read_corpus([tmp_path / "absent.txt"], CONTEXT)
    short.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="text must be files of UTF-8 text"):
        read_corpus([short], CONTEXT)


def test_a_derived_seed_depends_on_all_numbers():
    seeds = [derived_seed(*numbers) for numbers in ((0, 1), (1, 0), (0, 2), (0, 1, 0), (2**40, 1))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
