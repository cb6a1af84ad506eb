//! What a machine is made of: the emulator and a kernel, which are found or got as packages, and
//! what is built from the source. Each part has its line of progress.

use std::path::PathBuf;

use super::emulator::{Files, Linux, Machine};
use super::packages::{Cache, Downloads, Emulator};
use super::plan::Plan;
use super::source::{self, Source};
use super::{MachineArg, MetalArgs};
use crate::failure::Failure;
use crate::options::ValueName;
use crate::session::{Progress, Session};

/// Where the parts of a run come from.
pub(super) struct Parts<'a> {
    args: &'a MetalArgs,
    plan: &'a Plan,
    source: Option<Source>,
    /// The folder of what is built.
    target: PathBuf,
    cache: Cache,
    progress: Progress,
    session: &'a Session,
}

impl<'a> Parts<'a> {
    /// Of a run of `args`, with so many steps before the last part.
    pub(super) fn new(
        args: &'a MetalArgs,
        plan: &'a Plan,
        downloads: Downloads,
        nr_steps: u64,
        session: &'a Session,
    ) -> Parts<'a> {
        let source = Source::find();
        let target = source.as_ref().map_or_else(|| PathBuf::from("target/metal"), Source::target);
        let cache = Cache::new(args.cache.clone().unwrap_or_else(|| target.join("cache")), downloads);
        Parts { args, plan, source, target, cache, progress: session.progress(nr_steps), session }
    }

    /// The file of KVM's counts on this machine.
    pub(super) fn kvm_counts(&self) -> PathBuf {
        self.cache.file(&format!("kvm-counts-{}.json", self.plan.machine.name()))
    }

    pub(super) fn emulator(&self) -> Result<Emulator, Failure> {
        let emulator = match self.plan.machine {
            MachineArg::Svm | MachineArg::Arm | MachineArg::RiscV => {
                self.begin("looking for the emulator, QEMU 10 or newer");
                let architecture = self.plan.machine.architecture();
                Emulator::Qemu(self.cache.qemu(architecture, self.args.qemu.as_deref(), self.session)?)
            }
            MachineArg::Vmx => {
                self.begin("looking for the emulator, Bochs 2.7 or newer");
                Emulator::Bochs(self.cache.bochs(self.session)?)
            }
        };
        self.progress.step();
        Ok(emulator)
    }

    pub(super) fn guest_linux(&self) -> Result<Linux, Failure> {
        self.begin("looking for the guest's kernel");
        let kernel = match &self.args.kernel {
            Some(path) => path.clone(),
            None => self.cache.kernel(self.plan.machine.architecture(), self.session)?,
        };
        self.linux(kernel, Vec::new(), "building the guest's first process", "slat-guest-init")
    }

    pub(super) fn kvm_linux(&self) -> Result<Linux, Failure> {
        self.begin("looking for a kernel with KVM");
        let (kernel, modules) = self.cache.kvm_kernel(self.plan.machine.architecture(), self.session)?;
        self.linux(kernel, modules, "building the first process of the machine with KVM", "slat-kvm-init")
    }

    fn linux(&self, kernel: PathBuf, modules: Vec<PathBuf>, title: &str, init: &'static str) -> Result<Linux, Failure> {
        self.progress.step();
        self.begin(title);
        let libraries = self.cache.libraries(self.plan.machine.architecture(), self.session)?;
        let init = self.source()?.linux_program(init, libraries.as_ref(), self.plan, self.session)?;
        self.progress.step();
        Ok(Linux { kernel, init, modules })
    }

    /// The machine of all parts: the hypervisor's image is the last one.
    pub(super) fn machine(self, emulator: Emulator, linux: Option<Linux>) -> Result<Machine, Failure> {
        let image = match &self.args.image {
            Some(path) => path.clone(),
            None => {
                self.begin("building the hypervisor");
                self.source()?.hypervisor(self.plan, self.session)?
            }
        };
        Machine::new(emulator, &Files { image, linux }, self.plan, &self.target, self.session)
    }

    fn source(&self) -> Result<&Source, Failure> {
        source::required(self.source.as_ref())
    }

    fn begin(&self, what: &str) {
        self.progress.begin(what.to_owned());
    }
}
