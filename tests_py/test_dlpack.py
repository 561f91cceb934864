"""The boundary: who lends arrays how, what is refused, whose array comes back, and that nothing is copied or kept."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import weakref
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

import flashkernel as fk


def x(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


class Lender:
    """An array type that only speaks the Python DLPack protocol, with a choice of dialects."""

    def __init__(self, array, *, versioned=True, device=(1, 0)):
        self.array, self.versioned, self.device, self.calls = array, versioned, device, []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        self.calls.append(options)
        if not self.versioned and "max_version" in options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**options)


class TestImport:
    def test_kinds_of_arrays_mix_on_the_cpu(self):
        out = fk.add(torch.from_numpy(x(2, 3)), x(2, 3))
        assert isinstance(out, torch.Tensor) and torch.equal(out, torch.from_numpy(2 * x(2, 3)))
        out = fk.add(x(2, 3), torch.from_numpy(x(2, 3)))
        assert isinstance(out, np.ndarray)

    def test_torch_gets_tensors_of_its_own_making(self):
        """They are no views of foreign memory: their storage can be resized, in every dtype and shape."""
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for shape in ((2, 3), (0, 3), (1, 2, 1, 2)):
                values = torch.ones(shape, dtype=dtype)
                out = fk.add(values, values)
                assert out.untyped_storage().resizable() and out.is_contiguous() and out.dtype == dtype
                assert torch.equal(out, values + values) and out.untyped_storage().nbytes() == out.nbytes
        parameter = torch.nn.Parameter(torch.ones(3))
        assert type(fk.add(parameter.detach(), parameter.detach())) is torch.Tensor

    def test_torch_without_its_private_allocator(self):
        code = """
            import torch
            from torch._C._dynamo import guards
            del guards._empty_strided_cpu
            import flashkernel as fk
            values = torch.ones(2, 3)
            out = fk.add(values, values)
            assert torch.equal(out, 2 * values) and out.untyped_storage().resizable()
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)

    @pytest.mark.parametrize("versioned", [False, True])
    def test_plain_protocol(self, versioned):
        for array in (x(2, 3), torch.from_numpy(x(2, 3))):
            lender = Lender(array, versioned=versioned)
            out = fk.add(lender, lender)
            assert isinstance(out, fk.Array) and out.shape == (2, 3) and out.dtype == "float32" and out.device == "cpu"
            np.testing.assert_array_equal(np.asarray(out), 2 * x(2, 3))
            assert "stream" not in lender.calls[-1]

    def test_the_stream_that_arrays_of_a_gpu_are_asked_for(self, monkeypatch):
        """The caller's; else CuPy's current one; else the legacy default stream, which is 1 in the protocol."""

        class OnGpu(Lender):
            def __dlpack__(self, *, stream, max_version):  # memory that this build can read
                self.calls.append(stream)
                return self.array.__dlpack__(max_version=max_version)

        class Mine:
            def __cuda_stream__(self):
                return 0, 9

        lender = OnGpu(x(2, 3), device=(2, 0))
        for stream in (None, 7, Mine(), 1):
            np.testing.assert_array_equal(np.asarray(fk.add(lender, lender, stream=stream)), 2 * x(2, 3))
        assert lender.calls == [1, 1, 7, 7, 9, 9, 1, 1]
        cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=5)))
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        fk.add(lender, lender)
        fk.add(lender, lender, stream=7)
        assert lender.calls[-4:] == [5, 5, 7, 7]

    def test_an_array_namespace_gets_its_own_arrays_back(self):
        class Space:
            from_dlpack = staticmethod(np.from_dlpack)

        class Modern(Lender):
            def __array_namespace__(self):
                return Space

        out = fk.add(Modern(x(2, 3)), Modern(x(2, 3)))
        assert isinstance(out, np.ndarray)
        np.testing.assert_array_equal(out, 2 * x(2, 3))

    def test_own_arrays_go_round(self):
        own = fk.add(Lender(x(4)), Lender(x(4)))
        again = fk.add(own, own, out=own)
        assert again is own
        np.testing.assert_array_equal(np.asarray(own), 4 * x(4))
        assert "float32[4] on cpu" in repr(own)

    def test_read_only_arrays_are_read(self):
        a = x(3)
        a.flags.writeable = False
        np.testing.assert_array_equal(fk.add(a, a), 2 * x(3))
        np.testing.assert_array_equal(np.asarray(fk.add(Lender(a), Lender(a))), 2 * x(3))

    def test_negative_and_zero_strides(self):
        a = x(4, 3)
        np.testing.assert_array_equal(fk.add(a[::-1, ::-1], np.broadcast_to(a[0], (4, 3))), a[::-1, ::-1] + a[0])

    def test_parameters_and_subclasses(self):
        class Mine(torch.Tensor):
            pass

        weight = torch.nn.Parameter(torch.ones(2, 3))
        for y in (weight, torch.ones(2, 3).as_subclass(Mine)):
            with torch.no_grad():
                out = fk.linear(torch.ones(1, 3), y)
            assert out.tolist() == [[3.0, 3.0]] and not out.requires_grad

    def test_ml_dtypes(self):
        a = x(2, 3).astype(ml_dtypes.bfloat16)
        out = fk.add(a, a)
        assert out.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(out.astype(np.float32), 2 * x(2, 3))
        bits = a.view(np.uint16)
        np.testing.assert_array_equal(fk.add(bits, bits, dtype="bfloat16"), out.view(np.uint16))

    def test_torch_and_uint16_pages_mix(self):
        pool = fk.KvPagePool(2, heads_kv=1, head_dim=8, page_size=16, dtype="bfloat16")
        k = torch.ones(1, 1, 8, dtype=torch.bfloat16)
        fk.kv_append(k, k, pool.k_pages(), pool.v_pages(), torch.tensor([3]), dtype="bfloat16")
        assert (torch.from_dlpack(pool.k_pages(raw=True))[0, 3] == 1).all()

    def test_no_copy(self):
        """Writing through `out` reaches the caller's memory, whoever owns it."""
        storage = np.zeros((2, 6), np.float32)
        fk.add(x(2, 3), x(2, 3), out=storage[:, ::2])
        np.testing.assert_array_equal(storage[:, ::2], 2 * x(2, 3))
        assert (storage[:, 1::2] == 0).all()
        lender = Lender(np.zeros(3, np.float32))
        assert fk.add(x(3), x(3), out=lender) is lender
        np.testing.assert_array_equal(lender.array, 2 * x(3))

    def test_torch_outputs_are_written_in_place(self):
        class Mine(torch.Tensor):
            pass

        a = torch.arange(6.0).view(2, 3)
        for given in (torch.zeros(3, 2).t(), torch.zeros(2, 1, 6)[:, 0, ::2], torch.zeros(2, 3).as_subclass(Mine)):
            assert fk.add(a, a, out=given) is given
            assert given.tolist() == (2 * a).tolist()

    def test_a_lazy_clone_of_torch_is_written_alone(self):
        """Copy on write: the array that it still shares its memory with keeps its numbers."""
        a = torch.ones(3)
        clone = torch._lazy_clone(a)
        fk.add(a, a, out=clone)
        assert clone.tolist() == [2.0] * 3 and a.tolist() == [1.0] * 3


REFUSED = [
    (lambda: np.ones(3), r"add: a has dtype float64; float32"),
    (lambda: torch.ones(3, dtype=torch.float64), r"add: a has dtype float64"),
    (lambda: torch.ones(3, dtype=torch.bool), r"add: a has dtype bool"),
    (lambda: np.ones(3, bool), r"add: a has dtype bool"),
    (lambda: torch.ones(3, dtype=torch.complex64), r"add: a has dtype complex64"),
    (lambda: np.ones(3, np.complex64), r"add: a has dtype complex64"),
    (lambda: np.ones(3, np.int16), r"add: a has dtype int16"),
    (lambda: np.ones(3, np.uint16), r"add: a has dtype uint16; pass dtype=\"bfloat16\""),
    (lambda: np.array(["a"]), r"add: a has dtype <U1"),
    (lambda: np.ones(3, object), r"add: a has dtype object"),
    (lambda: np.ones(3, ">f4"), r"add: a is not in native byte order"),
    (lambda: np.ones(13, np.uint8)[1:].view(np.float32), r"add: a is not aligned"),
    (lambda: np.ones((1,) * 9, np.float32), r"add: a has 9 dims; at most 8"),
    (lambda: torch.ones((1,) * 9), r"add: a has 9 dims; at most 8"),
    (lambda: torch.ones(3, device="meta"), r"add: a is a tensor on the meta device, without memory"),
    (lambda: torch.ones(3).to_sparse(), r"add: a \(torch.Tensor\) has no memory"),
    (lambda: torch._neg_view(torch.ones(3)), r"add: a is a lazily negated view"),
    (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, r"add: a is a lazily negated view"),
    (lambda: Lender(x(3), device=(4, 0)), None),
]


class TestRefusals:
    @pytest.mark.parametrize("array, message", REFUSED)
    def test_arrays(self, array, message):
        bad = array()
        if message is None:  # the device of the capsule counts, not what the method claims
            assert np.asarray(fk.add(bad, bad)).tolist() == [0, 2, 4]
            return
        with pytest.raises(ValueError, match=message):
            fk.add(bad, bad)

    def test_fake_tensors(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            fake = torch.ones(3)
        with pytest.raises(TypeError, match=r"add: a is a torch.*FakeTensor; this op runs on real tensors only"):
            fk.add(fake, fake)
        with pytest.raises(TypeError, match=r"softmax: x is a torch.*FakeTensor; call flashkernel.torch.softmax"):
            fk.softmax(fake)

    @pytest.mark.parametrize("thing", [[1.0], 3, "q", object(), np.float32(1), int])
    def test_what_is_no_array(self, thing):
        with pytest.raises(TypeError, match=r"add: a is a .*; an array that speaks DLPack"):
            fk.add(thing, x(3))

    def test_none(self):
        with pytest.raises(TypeError):
            fk.add(None, x(3))

    def test_read_only_outputs(self):
        out = x(3)
        out.flags.writeable = False
        for given in (out, Lender(out)):
            with pytest.raises(ValueError, match="add: out is read-only"):
                fk.add(x(3), x(3), out=given)
        with pytest.raises(ValueError, match=r"add: out .* can't say whether it may be written"):
            fk.add(x(3), x(3), out=Lender(x(3), versioned=False))

    def test_lender_errors_pass_through(self):
        class Broken(Lender):
            def __dlpack__(self, **options):
                raise BufferError("no")

        with pytest.raises(BufferError, match="no"):
            fk.add(Broken(x(3)), x(3))

        class Liar(Lender):
            def __dlpack__(self, **options):
                return 5

        with pytest.raises(ValueError, match=r"gave 5; a capsule \"dltensor\" or"):
            fk.add(Liar(x(3)), x(3))

    @pytest.mark.parametrize("dtype", ["float16", "complex64", 3, np.float32])
    def test_dtype_hint(self, dtype):
        with pytest.raises(ValueError, match=r"add: dtype="):
            fk.add(x(3), x(3), dtype=dtype)


class Tensor(ctypes.Structure):
    """DLPack's DLTensor, DLManagedTensor(Versioned): tests make malformed ones."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


class Forger:
    """Hands out any DLManagedTensorVersioned and counts how often it is deleted."""

    def __init__(self, shape=(3,), strides=None, **fields):
        self.memory = np.zeros(64, np.float32)
        self.deleted = 0
        self.shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self.strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        self.managed = Managed(major=1, minor=0)
        self.managed.deleter = DELETER(self.delete)
        tensor = self.managed.tensor
        tensor.data, tensor.device_type, tensor.ndim = self.memory.ctypes.data, 1, len(shape)
        tensor.code, tensor.bits, tensor.lanes = 2, 32, 1
        tensor.shape = ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))
        if self.strides is not None:
            tensor.strides = ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64))
        for name, value in fields.items():
            setattr(tensor if hasattr(tensor, name) else self.managed, name, value)

    def delete(self, _):
        self.deleted += 1

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), b"dltensor_versioned", None)


FORGED = [
    ({"data": None}, "3 elements but no memory"),
    ({"ndim": -1}, "-1 dims"),
    ({"ndim": 9}, "9 dims"),
    ({"shape": (-3,)}, r"shape\[0\]=-3; must not be negative"),
    ({"shape": (2**62, 2**62)}, "overflow"),
    ({"shape": (2**31, 2**31), "strides": (2**31, 1)}, "overflow"),
    ({"shape": (3,), "strides": (2**62,)}, "overflow"),
    ({"shape": (3,), "strides": (-(2**63),)}, "overflow"),
    ({"lanes": 4}, "4 lanes"),
    ({"lanes": 0}, "0 lanes"),
    ({"code": 2, "bits": 8}, "float8"),
    ({"code": 12, "bits": 8}, "DLPack type code 12"),
    ({"device_type": 4}, "DLPack type 4"),
    ({"device_type": 7}, "DLPack type 7"),
    ({"byte_offset": 2}, "not a multiple of its element size"),
    ({"major": 2}, "speaks DLPack 2"),
]


class TestForgedTensors:
    @pytest.mark.parametrize("fields, message", FORGED)
    def test_refused_and_given_back(self, fields, message):
        forger = Forger(**fields)
        with pytest.raises(ValueError, match=message):
            fk.add(forger, forger)
        assert forger.deleted == 1

    def test_what_is_fine(self):
        for fields in (
            {},
            {"byte_offset": 8},
            {"device_type": 3},
            {"shape": (0, 2**40), "data": None},
            {"shape": (), "strides": ()},
            {"shape": (2, 3), "strides": (-3, 1), "byte_offset": 12},
        ):
            forger = Forger(**fields)
            fk.add(forger, forger)
            assert forger.deleted == 2


class TestExport:
    def array(self):
        return fk.add(Lender(x(2, 3)), Lender(x(2, 3)))

    def test_torch_and_numpy_share_the_memory(self):
        own = self.array()
        theirs = torch.from_dlpack(own)
        theirs[0, 0] = 7
        view = np.asarray(own)
        assert view[0, 0] == 7 and view.flags.writeable
        assert own.__dlpack_device__() == (1, 0)
        assert np.from_dlpack(own)[0, 0] == 7

    def test_old_and_new_capsules(self):
        own = self.array()
        assert '"dltensor"' in repr(own.__dlpack__())
        assert '"dltensor_versioned"' in repr(own.__dlpack__(max_version=(1, 0)))
        with pytest.raises(BufferError):
            own.__dlpack__(copy=True)
        with pytest.raises(BufferError):
            own.__dlpack__(dl_device=(2, 0))

    def test_memory_lives_as_long_as_its_last_view(self):
        gc.collect()
        before = fk.memory_stats().allocated_bytes
        own = self.array()
        held = fk.memory_stats().allocated_bytes
        assert held > before
        theirs, capsule = torch.from_dlpack(own), own.__dlpack__()
        view = np.asarray(own)
        del own
        gc.collect()
        assert fk.memory_stats().allocated_bytes == held
        del theirs, capsule
        assert (view == 2 * x(2, 3)).all()
        del view
        gc.collect()
        assert fk.memory_stats().allocated_bytes == before


class TestNothingIsKept:
    def test_arguments_die(self):
        class Mine(torch.Tensor):
            pass

        a = torch.ones(3).as_subclass(Mine)
        lender = Lender(x(3))
        gone = [weakref.ref(a), weakref.ref(lender)]
        fk.add(a, a)
        fk.add(lender, lender)
        with pytest.raises(ValueError, match="shape"):
            fk.add(lender, x(4))
        del a, lender
        gc.collect()
        assert [r() for r in gone] == [None, None]

    def test_no_growth_over_many_calls(self):
        a, t, bad = x(8), torch.ones(8), np.ones(8)

        def work():
            for _ in range(200):
                fk.add(a, a)
                fk.add(t, t, out=t)
                fk.add(Lender(a), Lender(a))
                with pytest.raises(ValueError):
                    fk.add(bad, a)

        work()
        gc.collect()
        count, held = len(gc.get_objects()), fk.memory_stats().allocated_bytes
        work()
        gc.collect()
        assert abs(len(gc.get_objects()) - count) < 50
        assert fk.memory_stats().allocated_bytes == held


def run(program: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


class TestProcess:
    """In processes of their own: exit, fork, threads. nanobind reports what leaked at exit on stderr."""

    def test_exit_with_live_objects(self):
        done = run("""
            import flashkernel as fk, numpy as np
            pool = fk.KvPagePool(4, heads_kv=1, head_dim=8, page_size=16)
            cache = fk.KvCache(pool)
            sequence = cache.create()
            slots = cache.append(sequence, 20)
            pages, raw = pool.k_pages(), pool.k_pages(raw=True)
            capsule = raw.__dlpack__()
            q = np.ones((1, 1, 4, 8), np.float32)
            keep = [fk.attention(q, q, q, return_lse=True), fk.explain("attention", q, q, q), fk.kernels()]
            cycle = [pool]; cycle.append(cycle)
        """)
        assert done.returncode == 0 and done.stderr == "", done.stderr

    def test_import_needs_neither_torch_nor_ml_dtypes(self):
        done = run("""
            import sys, flashkernel as fk, numpy as np
            fk.add(np.ones(2, np.float32), np.ones(2, np.float32))
            assert not {"torch", "ml_dtypes", "transformers", "jax"} & set(sys.modules)
        """)
        assert done.returncode == 0 and done.stderr == "", done.stderr

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
    def test_fork(self):
        done = run("""
            import os, flashkernel as fk, numpy as np
            fk.set_num_threads(2)
            q = np.random.default_rng(0).standard_normal((1, 4, 200, 32)).astype(np.float32)
            before = fk.attention(q, q, q)
            child = os.fork()
            after = fk.attention(q, q, q)
            assert (before == after).all()
            if child == 0:
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert status == 0, status
        """)
        assert done.returncode == 0, done.stderr

    def test_threads_call_at_once(self):
        done = run("""
            import threading, flashkernel as fk, numpy as np
            rng = np.random.default_rng(0)
            inputs = [rng.standard_normal((1, 2, 65, 16)).astype(np.float32) for _ in range(8)]
            truth = [fk.attention(q, q, q, causal=True) for q in inputs]
            wrong = []
            def work(i):
                for _ in range(50):
                    if not (fk.attention(inputs[i], inputs[i], inputs[i], causal=True) == truth[i]).all():
                        wrong.append(i)
            threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
            [t.start() for t in threads]; [t.join() for t in threads]
            assert not wrong, wrong
        """)
        assert done.returncode == 0, done.stderr

    def test_the_gil_is_released(self):
        done = run("""
            import threading, time, flashkernel as fk, numpy as np
            q = np.ones((1, 8, 2048, 64), np.float32)
            fk.set_num_threads(1)
            started, ticks, stop = threading.Event(), [], threading.Event()
            def tick():
                while not stop.is_set():
                    ticks.append(time.perf_counter()); time.sleep(0.001)
            thread = threading.Thread(target=tick); thread.start()
            a = time.perf_counter()
            with fk.force("attention_fwd/cpu/scalar"):
                fk.attention(q[:, :1], q[:, :1], q[:, :1])
            b = time.perf_counter(); stop.set(); thread.join()
            inside = [t for t in ticks if a < t < b]
            assert len(inside) > 5, (len(inside), b - a)
        """)
        assert done.returncode == 0, done.stderr
