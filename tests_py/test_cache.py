"""KvPagePool and KvCache from Python: pages as arrays, lifetimes, errors, and a random machine against a model."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

import flashkernel as fk
from flashkernel import reference


def make_pool(num_pages=8, **options):
    options = {"page_size": 16, "dtype": "float32", **options}
    return fk.KvPagePool(num_pages, heads_kv=1, head_dim=4, **options)


class TestPool:
    def test_take_retain_give_back(self):
        pool = make_pool(4)
        page = pool.take()
        pool.retain(page)
        assert pool.num_references(page) == 2 and (pool.num_free, pool.num_used) == (3, 1)
        pool.give_back(page)
        pool.give_back(page)
        assert pool.num_references(page) == 0 and pool.num_free == 4
        for call in (pool.give_back, pool.retain):
            for bad in (page, -1, 4):
                with pytest.raises(ValueError, match="KvPagePool"):
                    call(bad)
        pages = pool.take_many(4)
        assert sorted(pages) == [0, 1, 2, 3]
        with pytest.raises(fk.OutOfPagesError):
            pool.take()
        assert pool.take_many(0) == []
        with pytest.raises(ValueError, match="count=-1"):
            pool.take_many(-1)

    @pytest.mark.parametrize(
        "dtype", ["float32", "float16", "bfloat16", np.float16, torch.bfloat16, np.dtype("float32")]
    )
    def test_pages_are_arrays(self, dtype):
        pool = make_pool(dtype=dtype, num_layers=3, head_dim_v=6)
        name = pool.dtype
        assert name in str(dtype) or name in dtype.__name__
        shapes = {"k_pages": (8, 16, 1, 4), "v_pages": (8, 16, 1, 6)}
        for which, shape in shapes.items():
            layers = [getattr(pool, which)(layer) for layer in range(3)]
            for layer, pages in enumerate(layers):
                assert pages.shape == shape and pages.dtype == (np.uint16 if name == "bfloat16" else name)
                pages[:] = layer
            assert [int(pages.min()) for pages in layers] == [0, 1, 2] == [int(pages.max()) for pages in layers]
            theirs = torch.from_dlpack(getattr(pool, which)(1, raw=True))
            assert str(theirs.dtype) == f"torch.{name}" and theirs.data_ptr() == layers[1].ctypes.data
            for bad in (-1, 3):
                with pytest.raises(ValueError, match="layer"):
                    getattr(pool, which)(bad)

    def test_pages_keep_the_pool_alive(self):
        gc.collect()
        before = fk.memory_stats().allocated_bytes
        pool = make_pool()
        cache = fk.KvCache(pool)
        pages = pool.k_pages()
        pages[:] = 5
        del pool
        gc.collect()
        sequence = cache.create()
        assert cache.append(sequence, 3).shape == (3,)
        del cache
        gc.collect()
        assert (pages == 5).all() and fk.memory_stats().allocated_bytes > before
        del pages
        gc.collect()
        assert fk.memory_stats().allocated_bytes == before

    def test_text(self):
        assert repr(make_pool()) == "flashkernel.KvPagePool(8 pages of 16 tokens, 8 free, float32 on cpu)"
        pool = make_pool(head_dim_v=6, num_layers=2)
        assert (pool.num_pages, pool.page_size, pool.num_layers, pool.heads_kv) == (8, 16, 2, 1)
        assert (pool.head_dim, pool.head_dim_v, pool.device) == (4, 6, "cpu")


class TestCache:
    def test_append_and_tables(self):
        pool = make_pool()
        cache = fk.KvCache(pool)
        a, b = cache.create(), cache.create()
        slots = cache.append(a, 20)
        assert slots.dtype == np.int64 and len(set(slots.tolist())) == 20
        cache.append(b)
        assert (cache.length(a), cache.length(b), cache.num_pages(a)) == (20, 1, 2)
        np.testing.assert_array_equal(slots // 16, np.repeat(cache.pages(a), [16, 4]))
        table, lengths = cache.block_table([a, b])
        assert table.dtype == lengths.dtype == np.int32
        assert table.tolist() == [cache.pages(a).tolist(), [cache.pages(b)[0], -1]] and lengths.tolist() == [20, 1]
        assert cache.block_table([b, a], max_pages=5)[0].shape == (2, 5)
        assert cache.block_table([])[0].shape == (0, 0)
        with pytest.raises(ValueError, match="max_pages=1; a sequence has 2"):
            cache.block_table([a], max_pages=1)
        cache.truncate(a, 16)
        assert cache.num_pages(a) == 1
        with pytest.raises(ValueError, match="KvCache"):
            cache.truncate(a, 17)

    def test_pages_behind_a_window_go_back(self):
        """And attention with that window gives what it gave with all of them, whatever the table says there."""
        pool = fk.KvPagePool(4, 1, 8, page_size=16, dtype="float32")
        cache = fk.KvCache(pool)
        a = cache.create()
        rng = np.random.default_rng(0)
        k, v, q = (rng.standard_normal((60, 1, 8)).astype(np.float32) for _ in range(3))
        fk.kv_append(k, v, pool.k_pages(), pool.v_pages(), cache.append(a, 60))
        pages = pool.k_pages(), pool.v_pages()
        options = {"causal": True, "window": (19, 0)}
        q = q[:3].transpose(1, 0, 2)[None]
        expected = fk.attention_paged(q, *pages, *cache.block_table([a]), **options)
        assert cache.drop_before(a, 60 - 3 - 19) == 2 and pool.num_free == 2
        assert (cache.length(a), cache.num_pages(a)) == (60, 4) and cache.pages(a)[:2].tolist() == [-1, -1]
        table, lengths = cache.block_table([a])
        for dropped in (-1, 1 << 30):
            table[0, :2] = dropped
            np.testing.assert_array_equal(fk.attention_paged(q, *pages, table, lengths, **options), expected)
        with pytest.raises(fk.BlockTableError) as caught:  # a longer window would see them
            fk.attention_paged(q, *pages, *cache.block_table([a]), causal=True, window=(26, 0))
        assert (caught.value.sequence, caught.value.slot, caught.value.page) == (0, 1, -1)
        with pytest.raises(ValueError, match=r"kv_read: block_table\[0\]\[0\]=-1"):  # it reads everything
            fk.kv_read(*pages, *cache.block_table([a]))
        with pytest.raises(ValueError, match="drop_before"):
            cache.truncate(a, 31)
        with pytest.raises(ValueError, match="position=61"):
            cache.drop_before(a, 61)

    def test_freed_handles_are_recognised(self):
        cache = fk.KvCache(make_pool())
        old = cache.create()
        cache.free(old)
        new = cache.create()
        assert old != new and old == old and len({old, new}) == 2 and old != "x"
        for call in (cache.free, cache.append, cache.length, cache.fork, cache.pages, lambda s: cache.block_table([s])):
            with pytest.raises(ValueError, match="KvCache"):
                call(old)

    def test_handles_of_another_cache_are_refused(self):
        pool = make_pool()
        cache, other = fk.KvCache(pool), fk.KvCache(pool)
        mine, theirs = cache.create(), other.create()
        assert (mine.slot, mine.generation) == (theirs.slot, theirs.generation)
        assert mine != theirs and len({mine, theirs}) == 2 and mine.cache != theirs.cache
        calls = {
            "free": other.free, "append": other.append, "length": other.length, "num_pages": other.num_pages,
            "fork": other.fork, "pages": other.pages, "truncate": lambda s: other.truncate(s, 0),
            "drop_before": lambda s: other.drop_before(s, 0), "publish": lambda s: other.publish(s, []),
        }  # fmt: skip
        text = rf"is of cache {mine.cache}; needs one of this cache, {theirs.cache}"
        without = {"create", "block_table", "drop_cached", "stats", "pool"}  # block_table takes several: below
        assert {name for name in dir(fk.KvCache) if name[0] != "_"} == set(calls) | without
        for name, call in calls.items():
            with pytest.raises(ValueError, match=rf"KvCache\.{name}: sequence .* {text}"):
                call(mine)
        for ids in ([mine], [theirs, mine]):
            with pytest.raises(ValueError, match=text):
                other.block_table(ids)
        assert other.stats().num_sequences == 1 and pool.num_used == 0

    def test_a_handle_outlives_its_cache_and_names_nobody_then(self):
        pool = make_pool()
        for _ in range(20):  # some of them lie where one before them did
            cache = fk.KvCache(pool)
            old = cache.create()
            del cache
            cache = fk.KvCache(pool)
            cache.create()
            with pytest.raises(ValueError, match="is of cache"):
                cache.length(old)

    def test_handles_can_be_copied_but_not_pickled(self):
        cache = fk.KvCache(make_pool())
        sequence = cache.create()
        cache.append(sequence, 3)
        for same in (copy.copy(sequence), copy.deepcopy(sequence), copy.deepcopy([sequence])[0]):
            assert same == sequence and hash(same) == hash(sequence) and cache.length(same) == 3
        with pytest.raises(TypeError):  # a cache of another process may have the same number
            pickle.dumps(sequence)

    def test_a_table_is_no_wider_than_any_sequence(self):
        cache = fk.KvCache(make_pool())
        sequence = cache.create()
        with pytest.raises(ValueError, match="max_pages=134217729; needs 134217728 or less"):
            cache.block_table([sequence], max_pages=2**27 + 1)
        with pytest.raises(ValueError, match="max_pages=-1"):
            cache.block_table([sequence], max_pages=-1)

    def test_out_of_pages_changes_nothing(self):
        cache = fk.KvCache(make_pool(2))
        sequence = cache.create()
        cache.append(sequence, 10)
        for tokens in (30, 2**30):
            with pytest.raises(fk.OutOfPagesError) as caught:
                cache.append(sequence, tokens)
            assert caught.value.free_pages == 1
        assert cache.length(sequence) == 10 and cache.stats().num_pages_free == 1
        with pytest.raises(ValueError, match="num_tokens=-1"):
            cache.append(sequence, -1)

    def test_fork_copies_on_write(self):
        pool = make_pool()
        cache = fk.KvCache(pool)
        a = cache.create()
        slots = cache.append(a, 5)
        pool.k_pages().reshape(-1, 4)[slots] = 3
        b = cache.fork(a)
        assert cache.stats().num_pages_shared == 1
        new = cache.append(b, 1)
        assert new[0] // 16 != slots[0] // 16 and cache.stats().num_copies_on_write == 1
        assert (pool.k_pages().reshape(-1, 4)[cache.pages(b)[0] * 16 + np.arange(5)] == 3).all()

    @pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
    def test_prefixes_are_shared(self, kind):
        cache = fk.KvCache(make_pool())
        tokens = list(range(40))
        a = cache.create(kind(tokens))
        assert cache.length(a) == 0
        cache.append(a, 40)
        cache.publish(a, kind(tokens))
        b = cache.create(kind([*tokens[:33], 999]))
        assert cache.length(b) == 32 and cache.stats().num_prefix_hits == 2
        np.testing.assert_array_equal(cache.pages(b), cache.pages(a)[:2])
        cache.free(a)
        cache.free(b)
        assert cache.drop_cached() == 2 and cache.stats().num_pages_free == 8

    def test_bad_tokens(self):
        cache = fk.KvCache(make_pool())
        for bad in (["a"], [2**31], [1.5], 7):
            with pytest.raises(ValueError, match="tokens"):
                cache.create(bad)
        with pytest.raises(TypeError):
            cache.append("sequence", 1)


class CacheMachine(RuleBasedStateMachine):
    """Appends, forks, truncates and frees at random; attention over the pages equals attention over plain lists."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.pool = make_pool(10)
        self.cache = fk.KvCache(self.pool)
        self.pool.k_pages()[:] = self.pool.v_pages()[:] = np.nan
        self.model: dict[fk.SequenceId, list[np.ndarray]] = {}
        self.rng = np.random.default_rng(0)

    @rule(target=sequences)
    def create(self):
        sequence = self.cache.create()
        assert sequence not in self.model
        self.model[sequence] = []
        return sequence

    @rule(sequence=sequences, count=st.integers(0, 40))
    def append(self, sequence, count):
        before = self.cache.stats().num_pages_free
        try:
            slots = self.cache.append(sequence, count)
        except fk.OutOfPagesError:
            assert self.cache.stats().num_pages_free == before
            return
        tokens = self.rng.standard_normal((count, 1, 4)).astype(np.float32)
        fk.kv_append(tokens, -tokens, self.pool.k_pages(), self.pool.v_pages(), slots)
        self.model[sequence].extend(tokens)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        other = self.cache.fork(sequence)
        self.model[other] = list(self.model[sequence])
        return other

    @rule(sequence=sequences, part=st.floats(0, 1))
    def truncate(self, sequence, part):
        length = int(part * len(self.model[sequence]))
        self.cache.truncate(sequence, length)
        del self.model[sequence][length:]

    @rule(sequence=consumes(sequences))
    def free(self, sequence):
        self.cache.free(sequence)
        del self.model[sequence]

    @invariant()
    def pages_add_up(self):
        stats = self.cache.stats()
        held = {int(p) for s in self.model for p in self.cache.pages(s)}
        assert stats.num_pages_used == len(held) == self.pool.num_used
        assert stats.num_pages_free == self.pool.num_free == 10 - len(held)
        assert stats.num_sequences == len(self.model)
        for sequence, tokens in self.model.items():
            assert self.cache.length(sequence) == len(tokens)

    @invariant()
    def contents_are_the_models(self):
        order = list(self.model)
        if not order:
            return
        table, lengths = self.cache.block_table(order)
        k, v = fk.kv_read(self.pool.k_pages(), self.pool.v_pages(), table, lengths)
        q = np.ones((len(order), 1, 1, 4), np.float32)
        out = fk.attention_paged(q, self.pool.k_pages(), self.pool.v_pages(), table, lengths)
        for b, sequence in enumerate(order):
            tokens = np.array(self.model[sequence]).reshape(-1, 1, 4)
            np.testing.assert_array_equal(k[b, : len(tokens)], tokens)
            np.testing.assert_array_equal(v[b, : len(tokens)], -tokens)
            flat = tokens.transpose(1, 0, 2)[None]
            truth, _ = reference.attention(q[b : b + 1], flat, -flat)
            np.testing.assert_allclose(out[b : b + 1], truth, atol=1e-5)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=20, stateful_step_count=25, deadline=None, derandomize=True)
