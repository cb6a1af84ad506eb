use std::sync::Arc;

use slat::shadow::{PagingRegister, Privilege};
use slat::{Access, Gpa};

use super::address_space::{Region, RegionRights};
use super::layout::{DATA_PAGES, STACK_PAGES, TEXT_PAGES, USER_DATA, USER_STACK, USER_TEXT, direct, window};
use super::plain_cpu::{PlainCpu, PlainMemory};
use super::*;
use crate::hardware::cpu::CpuError;

pub(super) const CONFIGS: [KernelConfig; 4] = [
    KernelConfig { nr_vcpus: 1, isolation: Isolation::On, pcids: Pcids::On, processes_per_vcpu: 8 },
    KernelConfig { nr_vcpus: 1, isolation: Isolation::On, pcids: Pcids::Off, processes_per_vcpu: 8 },
    KernelConfig { nr_vcpus: 1, isolation: Isolation::Off, pcids: Pcids::On, processes_per_vcpu: 8 },
    KernelConfig { nr_vcpus: 1, isolation: Isolation::Off, pcids: Pcids::Off, processes_per_vcpu: 8 },
];

fn start(config: KernelConfig) -> KernelCpu<PlainCpu> {
    let kernel = Kernel::new(config).unwrap();
    let cpu = PlainCpu::new(PlainMemory::new(config.memory_bytes()));
    KernelCpu::start(kernel, 0, cpu).unwrap()
}

/// Shuts down, without a lost frame.
fn end(cpu: KernelCpu<PlainCpu>) {
    let kernel = Arc::clone(&cpu.core.kernel);
    cpu.shut_down().unwrap();
    assert_eq!(kernel.nr_frames_used(), 0);
}

fn write(cpu: &mut KernelCpu<PlainCpu>, pages: impl IntoIterator<Item = u64>) {
    pages.into_iter().for_each(|page| cpu.touch(page, Access::Write).unwrap());
}

fn read(cpu: &mut KernelCpu<PlainCpu>, pages: impl IntoIterator<Item = u64>) {
    pages.into_iter().for_each(|page| cpu.touch(page, Access::Read).unwrap());
}

fn denied(cpu: &mut KernelCpu<PlainCpu>, page: u64, access: Access) {
    let before = cpu.counters().stray_accesses;
    cpu.core.stray_touch(&mut cpu.current, page, access).unwrap();
    assert_eq!(cpu.counters().stray_accesses, before + 1, "{access:?} of page {page:#x}");
}

#[test]
fn a_system_call_loads_cr3_twice_under_isolation() {
    for config in CONFIGS {
        let mut cpu = start(config);
        write(&mut cpu, [USER_DATA, USER_DATA + 1]);
        let before = *cpu.counters();
        cpu.system_call(&[(USER_DATA, Access::Read), (USER_DATA + 1, Access::Write)]).unwrap();
        let done = *cpu.counters() - before;
        let loads = if config.isolation == Isolation::On { 2 } else { 0 };
        let kept = if config.pcids == Pcids::On { loads } else { 0 };
        assert_eq!((done.cr3_loads, done.cr3_loads_no_flush), (loads, kept), "{config:?}");
        assert_eq!((done.kernel_entries, done.system_calls, done.page_faults), (1, 1, 0));
        // The process reads what the kernel wrote.
        read(&mut cpu, [USER_DATA + 1]);
        end(cpu);
    }
}

#[test]
fn pages_come_on_demand_in_user_mode_and_in_the_kernel() {
    for config in CONFIGS {
        let mut cpu = start(config);
        cpu.touch(USER_TEXT, Access::Execute).unwrap();
        read(&mut cpu, [USER_DATA]);
        assert_eq!(cpu.counters().page_faults, 2);
        // A page that was read becomes writable by another fault, and is not copied.
        write(&mut cpu, [USER_DATA, USER_STACK]);
        assert_eq!((cpu.counters().page_faults, cpu.counters().copies_on_write), (4, 0));
        let entries = cpu.counters().kernel_entries;
        cpu.system_call(&[(USER_DATA + 5, Access::Write)]).unwrap();
        assert_eq!((cpu.counters().page_faults, cpu.counters().kernel_entries), (5, entries + 1));
        read(&mut cpu, [USER_DATA + 5]);
        assert_eq!(cpu.counters().page_faults, 5);
        end(cpu);
    }
}

#[test]
fn a_fork_shares_pages_until_they_are_written() {
    for config in CONFIGS {
        let mut cpu = start(config);
        cpu.touch(USER_TEXT, Access::Execute).unwrap();
        write(&mut cpu, USER_DATA..USER_DATA + DATA_PAGES);
        let parent = cpu.current.id;
        cpu.fork().unwrap();
        read(&mut cpu, USER_DATA..USER_DATA + DATA_PAGES);
        write(&mut cpu, [USER_DATA, USER_DATA + 1]);
        assert_eq!(cpu.counters().copies_on_write, 2);
        cpu.switch().unwrap();
        assert_ne!(cpu.current.id, parent);
        read(&mut cpu, USER_DATA..USER_DATA + DATA_PAGES);
        let before = *cpu.counters();
        // Only the child has the first two by now.
        write(&mut cpu, USER_DATA..USER_DATA + 4);
        let done = *cpu.counters() - before;
        assert_eq!((done.page_faults, done.copies_on_write), (4, 2));
        cpu.touch(USER_TEXT, Access::Execute).unwrap();
        cpu.exit().unwrap();
        assert_eq!(cpu.current.id, parent);
        read(&mut cpu, USER_DATA..USER_DATA + DATA_PAGES);
        write(&mut cpu, USER_DATA..USER_DATA + DATA_PAGES);
        assert_eq!(cpu.counters().copies_on_write, 4, "no other process has the pages");
        end(cpu);
    }
}

#[test]
fn exec_frees_all_frames_of_the_old_program() {
    for config in CONFIGS {
        let mut cpu = start(config);
        let empty = cpu.core.kernel.nr_frames_used();
        write(&mut cpu, USER_DATA..USER_DATA + DATA_PAGES);
        cpu.mmap(window(3), Region { nr_pages: 10, rights: RegionRights::ReadWrite }).unwrap();
        write(&mut cpu, window(3)..window(3) + 10);
        let old = cpu.current.id;
        cpu.exec().unwrap();
        assert_ne!(cpu.current.id, old);
        assert_eq!(cpu.core.kernel.nr_frames_used(), empty);
        denied(&mut cpu, window(3), Access::Read);
        read(&mut cpu, USER_STACK..USER_STACK + STACK_PAGES);
        end(cpu);
    }
}

#[test]
fn unmapped_pages_and_empty_tables_are_freed_at_once() {
    for config in CONFIGS {
        let mut cpu = start(config);
        // Across two page-table pages of level 1.
        let first = window(1) + 512 - 4;
        let before = cpu.core.kernel.nr_frames_used();
        cpu.mmap(first, Region { nr_pages: 40, rights: RegionRights::ReadWrite }).unwrap();
        write(&mut cpu, first..first + 40);
        // Pages, and page-table pages of levels 1 (two), 2 and 3.
        assert_eq!(cpu.core.kernel.nr_frames_used(), before + 40 + 4);
        let invlpgs = cpu.counters().invlpgs;
        cpu.munmap(first + 8, 3).unwrap();
        assert_eq!(cpu.counters().invlpgs, invlpgs + 3);
        for page in first + 8..first + 11 {
            denied(&mut cpu, page, Access::Read);
            denied(&mut cpu, page, Access::Write);
        }
        read(&mut cpu, [first + 7, first + 11]);
        // The first page-table page is empty now.
        cpu.munmap(first, 4).unwrap();
        assert_eq!(cpu.core.kernel.nr_frames_used(), before + 33 + 3);
        assert_eq!(cpu.counters().invlpgs, invlpgs + 3, "all is flushed where a table is freed");
        denied(&mut cpu, first, Access::Write);
        cpu.munmap(window(1), 1024).unwrap();
        assert_eq!(cpu.core.kernel.nr_frames_used(), before);
        denied(&mut cpu, first + 20, Access::Read);
        end(cpu);
    }
}

#[test]
fn many_pages_are_flushed_all_at_once() {
    let mut cpu = start(KernelConfig::default());
    cpu.mmap(window(0), Region { nr_pages: 48, rights: RegionRights::ReadWrite }).unwrap();
    write(&mut cpu, window(0)..window(0) + 48);
    let before = *cpu.counters();
    cpu.munmap(window(0), 40).unwrap();
    let done = *cpu.counters() - before;
    // The entry into the kernel, the flush, and the exit with the deferred flush of the user PCID.
    assert_eq!((done.invlpgs, done.invpcids, done.cr3_loads, done.cr3_loads_no_flush), (0, 0, 3, 1));
    denied(&mut cpu, window(0), Access::Read);
    end(cpu);
}

#[test]
fn rights_are_removed_at_once_and_added_without_a_flush() {
    for config in CONFIGS {
        let mut cpu = start(config);
        write(&mut cpu, USER_DATA..USER_DATA + 8);
        cpu.mprotect(USER_DATA + 2, 4, RegionRights::Read).unwrap();
        denied(&mut cpu, USER_DATA + 2, Access::Write);
        read(&mut cpu, USER_DATA..USER_DATA + 8);
        write(&mut cpu, [USER_DATA + 1, USER_DATA + 6]);
        let before = *cpu.counters();
        cpu.mprotect(USER_DATA + 2, 4, RegionRights::ReadWrite).unwrap();
        let done = *cpu.counters() - before;
        assert_eq!((done.invlpgs, done.invpcids), (0, 0));
        write(&mut cpu, USER_DATA + 2..USER_DATA + 6);
        let done = *cpu.counters() - before;
        // Each cache of the old rights caused one fault.
        assert_eq!(done.page_faults, done.spurious_faults);
        let keeps = config.pcids == Pcids::On || config.isolation == Isolation::Off;
        assert_eq!(done.spurious_faults, if keeps { 4 } else { 0 }, "{config:?}");
        cpu.mprotect(USER_DATA, 8, RegionRights::ReadExecute).unwrap();
        denied(&mut cpu, USER_DATA, Access::Write);
        cpu.touch(USER_DATA, Access::Execute).unwrap();
        cpu.mprotect(USER_TEXT, TEXT_PAGES, RegionRights::Read).unwrap();
        denied(&mut cpu, USER_TEXT, Access::Execute);
        end(cpu);
    }
}

#[test]
fn context_switches_keep_what_is_cached_of_the_last_few() {
    let mut cpu = start(KernelConfig::default());
    write(&mut cpu, [USER_DATA]);
    cpu.fork().unwrap();
    // Each has been loaded once.
    cpu.switch().unwrap();
    cpu.switch().unwrap();
    let before = *cpu.counters();
    for _ in 0..4 {
        cpu.switch().unwrap();
    }
    let done = *cpu.counters() - before;
    assert_eq!((done.context_switches, done.cr3_loads, done.cr3_loads_no_flush), (4, 12, 12));
    // More processes than ASIDs: each finds its own replaced.
    while cpu.has_place() {
        cpu.fork().unwrap();
    }
    for _ in 0..8 {
        cpu.switch().unwrap();
    }
    let before = *cpu.counters();
    for _ in 0..8 {
        cpu.switch().unwrap();
        write(&mut cpu, [USER_DATA]);
    }
    let done = *cpu.counters() - before;
    assert_eq!(done.context_switches, 8);
    assert!(done.cr3_loads - done.cr3_loads_no_flush >= 16, "{done:?}");
    end(cpu);
}

#[test]
fn temporary_mappings_are_flushed_when_all_are_used() {
    for config in CONFIGS {
        let mut cpu = start(config);
        for value in 0..40 {
            cpu.map_temporarily(value).unwrap();
        }
        let counters = *cpu.counters();
        let (invpcids, cr4_writes) = match (config.pcids, config.isolation) {
            (Pcids::On, _) => (2, 0),
            (Pcids::Off, Isolation::Off) => (0, 4),
            (Pcids::Off, Isolation::On) => (0, 0),
        };
        assert_eq!((counters.invpcids, counters.cr4_writes), (invpcids, cr4_writes));
        end(cpu);
    }
}

#[test]
fn user_mode_does_not_reach_the_kernel_nor_the_kernel_user_pages_by_mistake() {
    for config in CONFIGS {
        let mut cpu = start(config);
        write(&mut cpu, [USER_DATA]);
        cpu.core.stray_privileges(&mut cpu.current, Some(USER_DATA)).unwrap();
        assert_eq!(cpu.counters().stray_accesses, 4);
        denied(&mut cpu, USER_DATA, Access::Execute);
        denied(&mut cpu, USER_TEXT, Access::Write);
        end(cpu);
    }
}

#[test]
fn many_steps_of_all_operations_pass() {
    for (seed, config) in (0..).zip(CONFIGS) {
        let mut cpu = start(config);
        let done = cpu.run(&WorkloadMix::EVERYTHING, 40_000, seed).unwrap();
        assert_eq!(done.steps, 40_000);
        let all = [
            done.system_calls,
            done.page_faults,
            done.copies_on_write,
            done.forks,
            done.execs,
            done.exits,
            done.mmaps,
            done.munmaps,
            done.mprotects,
            done.context_switches,
            done.migrations,
            done.kernel_maps,
            done.stray_accesses,
            done.tables_allocated,
            done.tables_freed,
        ];
        assert!(all.iter().all(|count| *count >= 500), "{config:?}: {done:?}");
        assert_eq!(done.invpcids != 0, config.pcids == Pcids::On);
        end(cpu);
    }
}

#[test]
fn runs_are_reproducible() {
    let run = |seed| {
        let mut cpu = start(KernelConfig::default());
        let done = cpu.run(&WorkloadMix::COMPILE, 5_000, seed).unwrap();
        assert_eq!(done.user_work_ns, 5_000 * WorkloadMix::COMPILE.user_work_ns);
        done
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
    let mut cpu = start(KernelConfig::default());
    let done = cpu.run(&WorkloadMix::SYSTEM_CALLS, 1_000, 7).unwrap();
    assert_eq!((done.system_calls, done.forks, done.exits), (1_000, 0, 0));
    end(cpu);
}

#[test]
fn processes_move_between_cpus_on_threads() {
    for config in CONFIGS {
        let config = KernelConfig { nr_vcpus: 4, processes_per_vcpu: 4, ..config };
        let kernel = Kernel::new(config).unwrap();
        let memory = PlainMemory::new(config.memory_bytes());
        let cpus: Vec<KernelCpu<PlainCpu>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|vcpu| {
                    let (kernel, cpu) = (Arc::clone(&kernel), PlainCpu::new(memory.clone()));
                    scope.spawn(move || {
                        let mut cpu = KernelCpu::start(kernel, vcpu, cpu).unwrap();
                        let mix = WorkloadMix { migrations: 200, ..WorkloadMix::EVERYTHING };
                        cpu.run(&mix, 5_000, u64::from(vcpu)).unwrap();
                        cpu
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(cpus.iter().map(|cpu| cpu.counters().migrations).sum::<u64>() > 100);
        for cpu in cpus {
            cpu.shut_down().unwrap();
        }
        assert_eq!(kernel.nr_frames_used(), 0);
    }
}

#[test]
fn impossible_configurations_and_cpus_are_refused() {
    let good = KernelConfig::default();
    let refused = |config| Kernel::new(config).unwrap_err();
    for nr_vcpus in [0, 129] {
        assert_eq!(refused(KernelConfig { nr_vcpus, ..good }), KernelConfigError::Vcpus { nr_vcpus, max: 128 });
    }
    assert_eq!(refused(KernelConfig { processes_per_vcpu: 0, ..good }), KernelConfigError::NoProcesses);
    let great = KernelConfig { nr_vcpus: 128, processes_per_vcpu: 1_000, ..good };
    assert!(
        matches!(refused(great), KernelConfigError::Memory { memory_bytes, .. } if memory_bytes == great.memory_bytes())
    );

    let mut cpu = start(good);
    let another = |vcpu| {
        KernelCpu::start(Arc::clone(&cpu.core.kernel), vcpu, PlainCpu::new(PlainMemory::new(0)))
            .map(|_| ())
            .unwrap_err()
    };
    assert_eq!(another(0), KernelError::Started { vcpu: 0 });
    assert_eq!(another(1), KernelError::NoVcpu { vcpu: 1, nr_vcpus: 1 });
    let nothing = WorkloadMix { system_calls: 0, ..WorkloadMix::SYSTEM_CALLS };
    assert_eq!(cpu.run(&nothing, 1, 0), Err(KernelError::EmptyMix));
    let kernel = Kernel::new(good).unwrap();
    let failed = KernelCpu::start(kernel, 0, PlainCpu::new(PlainMemory::new(0))).map(|_| ()).unwrap_err();
    let is_its = |error| matches!(error, CpuError::NoMemory { gpa: Gpa(0x1000), .. });
    assert!(matches!(failed, KernelError::Access { error, .. } if is_its(error)), "{failed}");
}

/// Changes guest memory without the kernel.
fn tamper(cpu: &mut KernelCpu<PlainCpu>, gpa: u64, change: impl Fn(u64) -> u64) {
    let mut other = cpu.cpu().clone();
    other.set_privilege(Privilege::Supervisor);
    other.write_register(PagingRegister::Cr0, 0).unwrap();
    let gva = slat::shadow::Gva(gpa);
    let word = other.read(gva).unwrap();
    other.write(gva, change(word)).unwrap();
}

#[test]
fn changed_memory_and_changed_entries_are_detected() {
    let started = || {
        let mut cpu = start(KernelConfig::default());
        write(&mut cpu, [USER_DATA]);
        let frame = cpu.current.pages[&USER_DATA].frame;
        let table = cpu.current.tables[&(1, USER_DATA >> 9)].frame;
        (cpu, frame.gpa(), table.gpa() + 8 * (USER_DATA & 0x1ff))
    };
    // The process's page: detected by the process, and by the kernel when it unmaps.
    let (mut cpu, gpa, _) = started();
    tamper(&mut cpu, gpa, |word| word ^ 1);
    let error = cpu.touch(USER_DATA, Access::Read).unwrap_err();
    let is_users = |error| matches!(error, KernelError::WrongValue { privilege: Privilege::User, .. });
    assert!(is_users(error), "{error}");
    let (mut cpu, gpa, _) = started();
    tamper(&mut cpu, gpa, |_| 0);
    let error = cpu.exec().unwrap_err();
    assert!(matches!(error, KernelError::WrongValue { gva, found: 0, .. } if gva == direct(gpa)), "{error}");
    // Its PTE: another frame, a lost dirty bit, a lost accessed bit.
    for bit in [1 << 12, 1 << 6, 1 << 5, 1 << 1, 1] {
        let (mut cpu, _, entry) = started();
        tamper(&mut cpu, entry, |word| word ^ bit);
        let error = cpu.munmap(USER_DATA, 1).unwrap_err();
        assert!(matches!(error, KernelError::WrongEntry { level: 1, gpa, .. } if gpa == entry), "{bit:#x}: {error}");
    }
    // A dirty bit without a write.
    let (mut cpu, ..) = started();
    read(&mut cpu, [USER_DATA + 1]);
    let entry = cpu.current.tables[&(1, USER_DATA >> 9)].frame.gpa() + 8 * ((USER_DATA + 1) & 0x1ff);
    tamper(&mut cpu, entry, |word| word | 1 << 6);
    assert!(matches!(cpu.munmap(USER_DATA + 1, 1), Err(KernelError::WrongEntry { .. })));
    // A PTE of the root.
    let (mut cpu, ..) = started();
    let root = cpu.current.root.gpa();
    tamper(&mut cpu, root, |word| word + (1 << 12));
    assert!(matches!(cpu.munmap(USER_DATA, 1), Err(KernelError::WrongEntry { level: 4, .. })));
}
