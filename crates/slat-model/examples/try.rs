use slat_costed::dirty::DirtyTracking;
use slat_model::experiment::Hypervisor;
use slat_model::experiment::phases::*;
use slat_model::parameters::Parameters;
use slat_model::topology::Topology;
use std::time::Instant;
#[global_allocator]
static A: slat_model::arena::Allocator = slat_model::arena::Allocator;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let nr_vcpus: usize = args[1].parse().unwrap();
    let nr_pages: u64 = args[2].parse().unwrap();
    let p = Parameters::built_in().unwrap();
    let t = Topology::with_cpus(nr_vcpus).unwrap();
    let sharing = if args.get(3).is_some_and(|s| s == "o") { Sharing::Overlapping } else { Sharing::Partitioned };
    let alone = args.get(4).is_some_and(|s| s == "a");
    for (lock, hypervisor, tracking) in [
        (Lock::Exclusive, Hypervisor::Kvm, DirtyTracking::PageModificationLog),
        (Lock::Shared, Hypervisor::Kvm, DirtyTracking::PageModificationLog),
        (Lock::Exclusive, Hypervisor::Slat, DirtyTracking::WriteProtect),
        (Lock::Shared, Hypervisor::Slat, DirtyTracking::WriteProtect),
        (Lock::None, Hypervisor::Slat, DirtyTracking::WriteProtect),
    ] {
        let begin = Instant::now();
        let run = Phases {
            nr_vcpus,
            nr_pages,
            sharing,
            lock,
            hypervisor,
            tracking,
            nr_rounds: 2,
            around: if alone { Around::Nothing } else { Around::Host },
            seed: 1,
        }
        .run(&t, &p);
        match run {
            Ok(run) => {
                let ns = |t: u64| {
                    t as f64
                        / if sharing == Sharing::Partitioned {
                            nr_pages as f64 * nr_vcpus as f64
                        } else {
                            nr_pages as f64
                        }
                };
                let t = &run.times;
                println!(
                    "{lock:?} {hypervisor:?} populate {:.1} enable {:.1} dirty {:.1?} get {:.1?} disable {:.1} ns/page; {} accesses, hash {:x}, wall {:?}",
                    ns(t.populate_ns),
                    ns(t.enable_ns),
                    t.dirty_ns.iter().map(|&t| ns(t)).collect::<Vec<_>>(),
                    t.get_ns.iter().map(|&t| ns(t)).collect::<Vec<_>>(),
                    ns(t.disable_ns),
                    run.report.nr_accesses,
                    run.report.trace_hash,
                    begin.elapsed()
                );
                for hot in run.report.hot_places.iter().take(4) {
                    println!("   {} {} {} ns each", hot.place, hot.nr_fetches, hot.wait_ns / hot.nr_fetches);
                }
            }
            Err(e) => println!("{lock:?}: {e}"),
        }
    }
}
