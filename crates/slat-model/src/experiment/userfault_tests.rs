use super::*;

const NR_PAGES: u64 = 64;

const MODES: [Mode; 5] =
    [Mode::None, Mode::UserfaultfdOneReader, Mode::Userfaultfd, Mode::UserfaultfdAndExits, Mode::Exits];

fn experiment(nr_vcpus: usize, backing: Backing, uffds: Uffds, mode: Mode) -> Userfault {
    Userfault { nr_vcpus, nr_pages: NR_PAGES, backing, uffds, mode, hypervisor: Hypervisor::Kvm, seed: 1 }
}

fn run(experiment: &Userfault, topology: &str) -> UserfaultRun {
    let topology = Topology::named(topology).unwrap();
    experiment
        .run(&topology, &Parameters::built_in().unwrap())
        .unwrap_or_else(|error| panic!("{experiment:?}: {error}"))
}

#[test]
fn all_pages_arrive_in_each_mode_and_runs_are_the_same_each_time() {
    for backing in [Backing::Anonymous, Backing::Allocated] {
        for uffds in [Uffds::One, Uffds::PerVcpu] {
            for mode in MODES {
                let experiment = experiment(2, backing, uffds, mode);
                let [first, again] = [(); 2].map(|()| run(&experiment, "1x16"));
                assert_eq!(first, again, "{experiment:?}");
                assert_eq!(first.nr_arrived, 2 * NR_PAGES, "{experiment:?}");
                let nr_exits = if mode.uses_exits() { 2 * NR_PAGES } else { 0 };
                assert_eq!(first.nr_exits, nr_exits, "{experiment:?}");
            }
        }
    }
}

#[test]
fn readers_share_the_cpus_of_vcpus_where_none_is_free() {
    for mode in MODES {
        let run = run(&experiment(2, Backing::Anonymous, Uffds::One, mode), "1x2");
        assert_eq!(run.nr_arrived, 2 * NR_PAGES, "{mode:?}");
    }
}

#[test]
fn modes_have_the_order_of_the_published_figures_with_64_vcpus() {
    let rate = |uffds, mode| run(&experiment(64, Backing::Allocated, uffds, mode), "2x48").pages_per_second;
    let rates = [Mode::None, Mode::Exits, Mode::UserfaultfdAndExits, Mode::UserfaultfdOneReader, Mode::Userfaultfd]
        .map(|mode| rate(Uffds::One, mode));
    assert!(rates.is_sorted_by(|more, less| more > less), "{rates:?}");
    // A descriptor for each vCPU is between.
    let per_vcpu = rate(Uffds::PerVcpu, Mode::Userfaultfd);
    assert!(rates[3] < per_vcpu && per_vcpu < rates[2], "{rates:?} {per_vcpu}");
}

#[test]
fn faults_without_a_lock_resolve_the_same_pages() {
    for mode in MODES {
        let experiment =
            Userfault { hypervisor: Hypervisor::Slat, ..experiment(4, Backing::Allocated, Uffds::One, mode) };
        assert_eq!(run(&experiment, "1x16").nr_arrived, 4 * NR_PAGES, "{mode:?}");
    }
}

#[test]
fn a_memory_of_no_pages_is_an_error_of_the_engine() {
    let experiment = Userfault { nr_pages: 0, ..experiment(2, Backing::Anonymous, Uffds::One, Mode::Exits) };
    let outcome = experiment.run(&Topology::named("1x2").unwrap(), &Parameters::built_in().unwrap());
    assert!(matches!(outcome, Err(ModelError::Engine(_))), "{outcome:?}");
}

#[test]
fn a_number_of_vcpus_that_the_machine_does_not_have_is_an_error() {
    for nr_vcpus in [0, 3] {
        let topology = Topology::named("1x2").unwrap();
        let experiment = experiment(nr_vcpus, Backing::Anonymous, Uffds::One, Mode::Exits);
        let outcome = experiment.run(&topology, &Parameters::built_in().unwrap());
        assert!(
            matches!(outcome, Err(ModelError::TooManyVcpus { nr_vcpus: found, nr_cpus: 2, .. }) if found == nr_vcpus),
            "{outcome:?}"
        );
    }
}
