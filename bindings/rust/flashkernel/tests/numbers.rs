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
fn attention_reads_masks_and_the_forms_of_alibi() {
    // Scores are what the options make of 0; the values are 0, 1 and 2; the first query stands at the first key.
    let (q, k) = ([0.0f32; 24], [0.0f32; 24]);
    let v: Vec<f32> = (0..24).map(|i| (i / 8) as f32).collect();
    let attend = |options: &AttentionOptions<'_>| {
        let mut out = [0.0f32; 24];
        let (q, k) = (View::new(&q, &[1, 1, 3, 8]).unwrap(), View::new(&k, &[1, 1, 3, 8]).unwrap());
        let v = View::new(&v, &[1, 1, 3, 8]).unwrap();
        attention(&q, &k, &v, options, &mut ViewMut::new(&mut out, &[1, 1, 3, 8]).unwrap(), None).unwrap();
        [out[0], out[16]]
    };
    let mut words = [0i32];
    let mask = View::new(&[1u8, 0, 1], &[1, 3]).unwrap();
    pack_mask(&mask, &mut ViewMut::new(&mut words, &[1, 1]).unwrap()).unwrap();
    let mask = Some(View::new(&words, &[1, 1, 1, 1]).unwrap());
    assert!((attend(&AttentionOptions { mask, ..Default::default() })[0] - 1.0).abs() < 1e-6); // keys 0 and 2

    // Key j is j to the right: it weighs 2^-j, 2^j or 1. The last query stands at the last one, and key j weighs 2^-sqrt(2 - j).
    let slopes = [2f32.ln()];
    for (alibi, near, far) in [(Alibi::Distance, 0.5, 0.25), (Alibi::Signed, 2.0, 4.0), (Alibi::Sqrt, 1.0, 1.0)] {
        let alibi_slopes = Some(View::new(&slopes, &[1]).unwrap());
        let [found, last] = attend(&AttentionOptions { alibi_slopes, alibi, ..Default::default() });
        let expected = (near + 2.0 * far) / (1.0 + near + far);
        assert!((found - expected).abs() < 1e-5, "{alibi:?}: {found} {expected}");
        let far = if alibi == Alibi::Sqrt { 2f32.powf(-2f32.sqrt()) } else { 0.25 };
        let expected = (0.5 + 2.0) / (far + 0.5 + 1.0);
        assert!((last - expected).abs() < 1e-5, "{alibi:?}: {last} {expected}");
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
