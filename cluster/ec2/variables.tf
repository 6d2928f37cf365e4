variable "name" {
  description = "Names everything that is made"
  type        = string
  default     = "rapidraid"
}

variable "region" {
  description = "Where"
  type        = string
  default     = "eu-central-1"
}

variable "subnet" {
  description = "A subnet whose hosts get public addresses; all instances are in it"
  type        = string
}

variable "operator" {
  description = "Who may log in, such as 203.0.113.7/32"
  type        = string

  validation {
    condition     = can(cidrhost(var.operator, 0)) && var.operator != "0.0.0.0/0"
    error_message = "Name the addresses that you come from, such as 203.0.113.7/32; not the whole Internet."
  }
}

variable "nodes" {
  description = "Storage nodes; one more instance is the client"
  type        = number
  default     = 16

  validation {
    condition     = var.nodes >= 6 && var.nodes <= 64
    error_message = "From 6, for the code (6,4), to 64."
  }
}

variable "instance_type" {
  description = "README.md has their link rates"
  type        = string
  default     = "c7i.large"
}

variable "architecture" {
  description = "amd64, or arm64 for Graviton types"
  type        = string
  default     = "amd64"
}

variable "disk_gib" {
  description = "Each instance's volume"
  type        = number
  default     = 40
}

variable "disk_mib_s" {
  description = "Its throughput; gp3 gives 125 to 1000"
  type        = number
  default     = 500
}

variable "public_key" {
  description = "The operator's public ssh key, a file"
  type        = string
}

variable "private_key" {
  description = "The private one, a file; it stays on this machine"
  type        = string
}

variable "program" {
  description = "The program to install, built for the instances' processor"
  type        = string
  default     = "../../target/release/rapidraid"
}

variable "cluster_program" {
  description = "The program that measures the network on the hosts, built for the same processor"
  type        = string
  default     = "../../target/release/rapidraid-cluster"
}

variable "inventory" {
  description = "The file for `rapidraid-cluster run --on`"
  type        = string
  default     = "inventory.toml"
}
