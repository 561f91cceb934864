//! Ops against numbers worked out by hand, and refusals.
use flashkernel::*;

#[test]
fn ops_compute() {
    let x = [3.0f32, 4.0];
    let mut out = [0.0f32; 2];
    rms_norm(&View::new(&x, &[1, 2]).unwrap(), None, 0.0, &mut ViewMut::new(&mut out, &[1, 2]).unwrap()).unwrap();
    assert!((out[0] - 3.0 / 12.5f32.sqrt()).abs() < 1e-6 && (out[1] - 4.0 / 12.5f32.sqrt()).abs() < 1e-6);
    softmax(&View::new(&[0.0f32, 3f32.ln()], &[2]).unwrap(), &mut ViewMut::new(&mut out, &[2]).unwrap(), -1).unwrap();
    assert!((out[0] - 0.25).abs() < 1e-6 && (out[1] - 0.75).abs() < 1e-6);
    let weight = [1.0f32, 2.0, 3.0, 4.0]; // taken as it lies, and turned
    let (plain, turned) = (View::new(&weight, &[2, 2]).unwrap(), View::with_strides(&weight, &[2, 2], &[1, 2]).unwrap());
    for (view, expected) in [(plain, [11.0, 25.0]), (turned, [15.0, 22.0])] {
        let x = View::new(&x, &[1, 2]).unwrap();
        linear(&x, &view, None, Activation::None, &mut ViewMut::new(&mut out, &[1, 2]).unwrap()).unwrap();
        assert_eq!(out, expected);
    }
}

#[test]
fn half_types_round_and_add() {
    for bits in 0..=u16::MAX {
        let (half, brain) = (F16(bits), Bf16(bits));
        assert!(half.to_f32().is_nan() || F16::from_f32(half.to_f32()) == half, "{bits:x}");
        assert!(brain.to_f32().is_nan() || Bf16::from_f32(brain.to_f32()) == brain, "{bits:x}");
    }
    let (a, b) = ([F16::from_f32(1.5); 4], [F16::from_f32(-0.25); 4]);
    let mut out = [F16(0); 4];
    add(&View::new(&a, &[4]).unwrap(), &View::new(&b, &[4]).unwrap(), &mut ViewMut::new(&mut out, &[4]).unwrap()).unwrap();
    assert!(out.iter().all(|x| x.to_f32() == 1.25));
}

#[test]
fn refusals_are_typed() {
    assert!(View::new(&[1.0f32; 3], &[2, 2]).is_err());
    assert!(View::new(&[1.0f32; 1], &[1; 9]).is_err());
    assert!(View::with_strides(&[1.0f32; 4], &[2, 2], &[1, 3]).is_err());
    assert!(View::with_strides(&[1.0f32; 4], &[usize::MAX, 2], &[usize::MAX, 3]).is_err());
    assert_eq!(set_num_threads(0).unwrap_err().kind, ErrorKind::InvalidArgument);
    assert_eq!(force_kernels("no_such").unwrap_err().kind, ErrorKind::InvalidArgument);
}

#[test]
fn caches_end_in_typed_errors_and_may_move_to_other_threads() {
    let options =
        PagePoolOptions { num_pages: 2, heads_kv: 1, head_dim: 8, page_size: 16, num_layers: 1, dtype: DType::Float16 };
    let mut cache = KvCache::new(&options).unwrap();
    let sequence = cache.create().unwrap();
    assert_eq!(cache.append(sequence, 33).unwrap_err().kind, ErrorKind::OutOfPages);
    assert_eq!(cache.len(sequence).unwrap(), 0);
    let mut cache = std::thread::spawn(move || {
        assert_eq!(cache.append(sequence, 20).unwrap().len(), 20);
        cache
    })
    .join()
    .unwrap();
    assert_eq!((cache.len(sequence).unwrap(), cache.num_free_pages()), (20, 0));
    cache.free(sequence).unwrap();
    assert_eq!(cache.free(sequence).unwrap_err().kind, ErrorKind::InvalidArgument);
    assert_eq!(cache.num_free_pages(), 2);
}
