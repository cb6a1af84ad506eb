//! A case: one way of bringing pages, for one number of vCPUs, on one kind of memory.

use std::fmt;

use clap::ValueEnum;
use slat_machine::vm::demand_paging::PagedBacking;

use crate::options::ValueName;
use crate::results::{Labels, labels};

/// How a missing page is noticed and brought. The names are those of results.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, ValueEnum)]
pub(crate) enum Mode {
    /// No userfault: the host has the page.
    None,
    /// userfaultfd, for missing pages, which are copied.
    Missing,
    /// The same with one reader on one descriptor.
    #[value(name = "missing-1r")]
    MissingOneReader,
    /// `Missing` for other threads than vCPUs, and userfault exits for vCPUs.
    #[value(name = "missing+uf")]
    MissingAndExits,
    /// userfaultfd, for pages that are there and not mapped.
    Minor,
    /// The same with one reader on one descriptor.
    #[value(name = "minor-1r")]
    MinorOneReader,
    /// `Minor` for other threads than vCPUs, and userfault exits for vCPUs.
    #[value(name = "minor+uf")]
    MinorAndExits,
    /// Userfault exits.
    #[value(name = "uf")]
    Exits,
    /// Userfault requests through rings, which a resolver in another thread or process answers.
    #[value(name = "uf-ring")]
    Ring,
}

impl Mode {
    /// Whether vCPUs wait only for userfaultfd.
    pub(crate) fn is_userfaultfd_alone(self) -> bool {
        matches!(self, Mode::Missing | Mode::MissingOneReader | Mode::Minor | Mode::MinorOneReader)
    }

    /// Whether the mode uses userfaultfd.
    pub(crate) fn has_userfaultfd(self) -> bool {
        self.is_userfaultfd_alone() || matches!(self, Mode::MissingAndExits | Mode::MinorAndExits)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

/// How many userfaultfd descriptors there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Uffds {
    /// One for all memory.
    One,
    /// One for the memory of each vCPU.
    PerVcpu,
}

impl Uffds {
    /// In words.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Uffds::One => "one descriptor",
            Uffds::PerVcpu => "one descriptor for each vCPU",
        }
    }
}

/// The parameters of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Case {
    pub(super) mode: Mode,
    pub(super) nr_vcpus: usize,
    pub(super) bytes_per_vcpu: u64,
    pub(super) backing: PagedBacking,
    pub(super) uffds: Uffds,
    /// Threads that read each descriptor.
    pub(super) nr_readers: usize,
}

impl Case {
    /// Its name in the progress.
    pub(super) fn title(&self) -> String {
        format!("{} vCPUs, {}, {}, {}", self.nr_vcpus, self.backing, self.uffds.describe(), self.mode)
    }

    /// The labels that identify it in results.
    pub(super) fn labels(&self) -> Labels {
        labels([
            ("mode", self.mode.name().into()),
            ("vcpus", self.nr_vcpus.into()),
            ("backing", self.backing.to_string().into()),
            ("uffds", self.uffds.name().into()),
        ])
    }
}
