//! The cost of the flush rule on this machine: nanoseconds of a checked operation and of a flush,
//! alone and with a running peer.
#![expect(unsafe_code, reason = "checked operations work on raw pointers")]

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use slat::{Gfn, GfnRange};
use slat_machine::commit::{FlushDomain, FlushMethod, Port};

const NR_OPERATIONS: u32 = 50_000_000;
const NR_FLUSHES: u32 = 20_000;
const PAGE: [GfnRange; 1] = [GfnRange::new(Gfn(0), 1)];

fn ns_each(count: u32, work: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    work();
    begin.elapsed().as_secs_f64() * 1e9 / f64::from(count)
}

fn main() {
    for method in [FlushMethod::Restartable, FlushMethod::Waiting] {
        let domain = match FlushDomain::with_method(method) {
            Ok(domain) => Arc::new(domain),
            Err(why) => {
                println!("{method}: {why}");
                continue;
            }
        };
        println!("{method}");
        let port = Port::new(&domain);
        let words: Vec<AtomicU64> = (0..512).map(AtomicU64::new).collect();
        let plain = ns_each(NR_OPERATIONS, || {
            for n in 0..NR_OPERATIONS {
                black_box(&words[(n & 511) as usize]).store(n.into(), Ordering::Release);
            }
        });
        let store = ns_each(NR_OPERATIONS, || {
            for n in 0..NR_OPERATIONS {
                let at = black_box(&words[(n & 511) as usize]).as_ptr();
                // SAFETY: the words live to the end of main.
                black_box(unsafe { port.store_u64(port.generation(), at, n.into()) }).ok();
            }
        });
        let load = ns_each(NR_OPERATIONS, || {
            for n in 0..NR_OPERATIONS {
                let at = black_box(&words[(n & 511) as usize]).as_ptr();
                // SAFETY: the words live to the end of main.
                black_box(unsafe { port.load_u64(port.generation(), at) }).ok();
            }
        });
        let exchange = ns_each(NR_OPERATIONS, || {
            for n in 0..NR_OPERATIONS {
                let at = black_box(&words[(n & 511) as usize]).as_ptr();
                // SAFETY: the words live to the end of main.
                let _ = black_box(unsafe { port.compare_exchange_u64(port.generation(), at, 1, 2) });
            }
        });
        println!(
            "  plain store {plain:.2} ns; checked store {store:.2} ns, load {load:.2} ns, cmpxchg {exchange:.2} ns"
        );
        let alone = ns_each(NR_FLUSHES, || (0..NR_FLUSHES).for_each(|_| domain.flush(&PAGE)));
        let stop = AtomicBool::new(false);
        let peer = std::thread::scope(|scope| {
            scope.spawn(|| {
                let port = Port::new(&domain);
                let word = AtomicU64::new(0);
                while !stop.load(Ordering::Relaxed) {
                    // SAFETY: the word lives as long as the thread.
                    black_box(unsafe { port.store_u64(port.generation(), word.as_ptr(), 1) }).ok();
                }
            });
            std::thread::sleep(std::time::Duration::from_millis(20));
            let peer = ns_each(NR_FLUSHES, || (0..NR_FLUSHES).for_each(|_| domain.flush(&PAGE)));
            stop.store(true, Ordering::Relaxed);
            peer
        });
        println!("  flush alone {alone:.0} ns, with a running peer {peer:.0} ns");
    }
}
