//! What things cost: numbers from a file, each with its source there.

use std::fs;

use serde::Deserialize;

use crate::error::ModelError;

/// Virtual time in picoseconds.
pub(crate) type Ps = u64;

/// Picoseconds of a nanosecond.
pub(crate) const PS_PER_NS: Ps = 1000;

/// Whole nanoseconds.
pub(crate) fn ns(time: Ps) -> u64 {
    time / PS_PER_NS
}

/// The parameters that the program has.
pub(crate) const BUILT_IN: &str = include_str!("../parameters.toml");

/// What things cost. The file says what each is, and where it is from.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the file of the parameters has their meaning and their sources")]
pub struct Parameters {
    pub coherence: Coherence,
    pub work: Work,
    pub host: Host,
    pub guest: Guest,
    pub kvm: Kvm,
    pub userfault: Userfault,
}

/// A time in nanoseconds, as the file has it.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(try_from = "f64")]
pub struct Ns(f64);

impl TryFrom<f64> for Ns {
    type Error = String;

    fn try_from(value: f64) -> Result<Ns, String> {
        // A second is more than anything that is modelled takes.
        if (0.0..=1e9).contains(&value) { Ok(Ns(value)) } else { Err(format!("{value} is no time in nanoseconds")) }
    }
}

impl Ns {
    /// The time in seconds.
    pub fn seconds(self) -> f64 {
        self.0 / 1e9
    }

    pub(crate) fn ps(self) -> Ps {
        (self.0 * PS_PER_NS as f64).round() as Ps
    }
}

/// A rate or a number, above zero.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(try_from = "f64")]
pub struct Positive(f64);

impl TryFrom<f64> for Positive {
    type Error = String;

    fn try_from(value: f64) -> Result<Positive, String> {
        // Less makes times that no clock can hold.
        if (1e-3..=1e9).contains(&value) { Ok(Positive(value)) } else { Err(format!("{value} is not in 0.001 to 1e9")) }
    }
}

impl Positive {
    pub(crate) fn get(self) -> f64 {
        self.0
    }

    pub(crate) fn whole(self) -> u64 {
        (self.0 as u64).max(1)
    }
}

macro_rules! section {
    ($(#[$about:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? }) => {
        $(#[$about])*
        #[derive(Clone, PartialEq, Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        #[expect(missing_docs, reason = "the file of the parameters has their meaning and their sources")]
        pub struct $name { $(pub $field: $type),* }
    };
}

section! {
    /// Of cache lines.
    Coherence {
        hit: Ns,
        transfer_in_complex: Ns,
        transfer_in_node: Ns,
        transfer_across_nodes: Ns,
        memory_local: Ns,
        memory_remote: Ns,
        link_held: Ns,
        rmw: Ns,
        fence: Ns,
        pause: Ns,
        held_after_read: Ns,
        held_after_write: Ns,
        core_lines: Positive,
    }
}

section! {
    /// Of instructions.
    Work { instructions_per_ns: Positive, smt_share: Positive, per_access: Positive }
}

section! {
    /// Of the hypervisor around the engine, and its operating system.
    Host {
        exit: Ns,
        page_lookup: Ns,
        page_fault: Ns,
        zero_page: Ns,
        zero_bytes_per_ns: Positive,
        zone_batch: Positive,
        zone_held: Ns,
        lru_batch: Positive,
        lru_held: Ns,
        page_table_held: Ns,
        ipi_send: Ns,
        ipi_each: Ns,
        ipi_answer: Ns,
        thread_switch: Ns,
        quantum: Ns,
        wake: Ns,
    }
}

section! {
    /// Of the guest and its hardware.
    Guest { page_instructions: Positive, tlb_hit: Ns, walk: Ns, memory_parallelism: Positive, tlb_entries: Positive }
}

section! {
    /// Of what is measured against.
    Kvm {
        fault_in_lock: Ns,
        fault_outside: Ns,
        enable_instructions_alone: Positive,
        enable_instructions_shared: Positive,
        get_instructions_alone: Positive,
        get_instructions_shared: Positive,
    }
}

section! {
    /// Of demand paging in user space.
    Userfault {
        syscall: Ns,
        user_exit: Ns,
        epoll_wait: Ns,
        read_message: Ns,
        epoll_callback: Ns,
        wait_entry: Ns,
        wake_call: Ns,
    }
}

impl Parameters {
    /// Those of the program.
    ///
    /// # Errors
    /// [`ModelError::Parameters`]: never, as a test shows.
    pub fn built_in() -> Result<Parameters, ModelError> {
        Parameters::parse("parameters.toml", BUILT_IN)
    }

    /// Those of a file.
    ///
    /// # Errors
    /// [`ModelError::Parameters`]: it cannot be read, or one is missing, unknown, or no number that
    /// it can be.
    pub fn from_file(name: &str) -> Result<Parameters, ModelError> {
        let text = fs::read_to_string(name)
            .map_err(|error| ModelError::Parameters { name: name.to_owned(), why: error.to_string() })?;
        Parameters::parse(name, &text)
    }

    fn parse(name: &str, text: &str) -> Result<Parameters, ModelError> {
        toml::from_str(text).map_err(|error| ModelError::Parameters {
            name: name.to_owned(),
            why: error.to_string().trim_end().to_owned(),
        })
    }

    /// These, with caches that are smaller by a factor.
    pub(crate) fn with_smaller_caches(&self, factor: f64) -> Parameters {
        let lines = (self.coherence.core_lines.get() * factor.min(1.0)).max(1.0);
        Parameters { coherence: Coherence { core_lines: Positive(lines), ..self.coherence.clone() }, ..self.clone() }
    }

    /// The time of so many instructions.
    pub(crate) fn instructions(&self, nr_instructions: f64) -> Ps {
        (nr_instructions / self.work.instructions_per_ns.get() * PS_PER_NS as f64).round() as Ps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_parameter_is_there_and_is_a_number_that_it_can_be() {
        let built_in = Parameters::built_in().unwrap();
        assert_eq!(built_in.coherence.transfer_across_nodes.ps(), 130_000);
        for (from, to, why) in [
            ("hit = 0.5", "", "missing field `hit`"),
            ("hit = 0.5", "hit = -1", "-1 is no time"),
            ("hit = 0.5", "hit = inf", "inf is no time"),
            ("hit = 0.5", "hit = 'none'", "invalid type"),
            ("hit = 0.5", "hit = 0.5\nmiss = 3", "unknown field `miss`"),
            ("per_access = 9", "per_access = 0", "0 is not in 0.001"),
        ] {
            let found = Parameters::parse("p", &BUILT_IN.replace(from, to)).expect_err(to).to_string();
            assert!(found.starts_with("parameters p: ") && found.contains(why), "{to}: {found}");
        }
        assert!(Parameters::from_file("/no/such/file").is_err());
    }
}
